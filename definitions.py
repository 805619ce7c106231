"""The code location that Dagster loads."""

import dagster as dg

defs = dg.Definitions()
