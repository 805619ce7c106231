"""One exception tree, split by what the caller would do about it.

Losing a race is not an exception: `arroyo_dagster.log` returns it as a value.
"""


class ArroyoDagsterError(Exception):
    """Base of everything this library raises on purpose. Its message is one sentence for a person."""


class ConfigurationError(ArroyoDagsterError, ValueError):
    """The caller asked for something that cannot be: change the configuration. Nothing was changed."""


class StorageError(ArroyoDagsterError):
    """The storage did not answer, or said no: try again later. The call may or may not have had its effect."""


class AttemptError(ArroyoDagsterError):
    """An attempt at an epoch failed, and nothing of it was committed: mend the cause; the next one starts over."""


class ProtocolError(ArroyoDagsterError):
    """The log contradicts itself: stop, and look at what wrote it."""


class DamagedObjectError(ProtocolError):
    """A stored object is truncated, altered, or not ours."""


class NewerFormatError(ArroyoDagsterError):
    """A stored object was written by a newer release: upgrade."""
