"""Which format a file has: told by its name, else by its first bytes."""

from nightmill.errors import ValidationError
from nightmill.reader.jsonl import JsonlSource
from nightmill.reader.parquet import ParquetSource
from nightmill.reader.source import Source, reading
from nightmill.storage import Storage, open_storage

PARQUET_SUFFIXES = (".parquet", ".pq", ".parq")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = PARQUET_SUFFIXES + JSONL_SUFFIXES
_PARQUET_MAGIC = b"PAR1"


def open_source(uri: str, storage: Storage | None = None) -> Source:
    """Open an input file; close it by leaving its `with`.

    Raises:
        StorageError: missing, unreadable or damaged.
        ValidationError: neither Parquet nor JSON lines.
    """
    storage = storage or open_storage(uri)
    name = uri.lower()
    if name.endswith(PARQUET_SUFFIXES):
        return ParquetSource(uri, storage)
    if name.endswith(JSONL_SUFFIXES):
        return JsonlSource(uri, storage)
    with reading(uri), storage.open_input(uri) as file:
        magic = file.read(len(_PARQUET_MAGIC))
    if magic == _PARQUET_MAGIC:
        return ParquetSource(uri, storage)
    raise ValidationError(
        f"{uri} is neither a Parquet file nor a .jsonl file",
        hint="Give a Parquet file, a .jsonl file in OpenAI batch form, a folder of them, or a quoted glob.",
    )
