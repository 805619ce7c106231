import pyarrow as pa
import pyarrow.compute as pc

CLEAN = pa.schema([("auction", pa.int64()), ("euros", pa.float64()), ("date_time", pa.timestamp("us", "UTC"))])


def in_euros(batch: pa.RecordBatch) -> pa.RecordBatch:
    from bidding.rates import CENTS_PER_EURO  # type: ignore[import-not-found]  # noqa: PLC0415 - the point

    euros = pc.divide(batch["price"].cast(pa.float64()), CENTS_PER_EURO)
    return pa.RecordBatch.from_arrays([batch["auction"], euros, batch["date_time"]], schema=CLEAN)
