"""The built-in sources."""

from arroyo_dagster.sources.files import FileSource
from arroyo_dagster.sources.nexmark import NexmarkSource

__all__ = ["FileSource", "NexmarkSource"]
