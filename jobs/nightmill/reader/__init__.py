"""Input files as streams of record batches, in bounded memory."""

from nightmill.reader.columns import InputColumns, resolve_columns
from nightmill.reader.formats import open_source
from nightmill.reader.shard import RowBatch, read_range, read_shard
from nightmill.reader.source import Extent, Source, is_openai_form, num_rows, reading

__all__ = [
    "Extent",
    "InputColumns",
    "RowBatch",
    "Source",
    "is_openai_form",
    "num_rows",
    "open_source",
    "read_range",
    "read_shard",
    "reading",
    "resolve_columns",
]
