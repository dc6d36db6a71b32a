"""What the rest of the program sees of an input file, whatever its format."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import pyarrow as pa

from nightmill.errors import NightmillError, StorageError

METADATA_PREFIX = b"nightmill."
"""Keys of ours in a schema's or a part's metadata. An input that is itself our output loses them on reading."""

OPENAI_FORM_KEY = METADATA_PREFIX + b"openai_form"

BATCH_BYTES = 8 * 2**20
"""Aim for the decoded size of one record batch; what a reader holds is a small multiple of it."""

MAX_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of consecutive rows that is cheap to read from its start: a row group, or a stretch of JSON lines."""

    num_rows: int
    num_bytes: int  # uncompressed


class Source(Protocol):
    """An open input file."""

    @property
    def uri(self) -> str:
        """Where it is."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """All its columns."""
        ...

    @property
    def extents(self) -> Sequence[Extent]:
        """All its rows, in order."""
        ...

    def batches(self, row_start: int, row_end: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Rows [row_start, row_end) in order, without gaps, in batches of about BATCH_BYTES; `None` = all columns."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def is_openai_form(schema: pa.Schema) -> bool:
    """Whether rows are OpenAI batch requests (`custom_id`, `method`, `url`, `body`) read from JSON lines."""
    return OPENAI_FORM_KEY in (schema.metadata or {})


def num_rows(source: Source) -> int:
    """Rows of a whole source."""
    return sum(extent.num_rows for extent in source.extents)


@contextlib.contextmanager
def reading(uri: str, what: str = "read") -> Iterator[None]:
    """Turn what Arrow and the system raise about a file into a StorageError that names it."""
    try:
        yield
    except NightmillError:
        raise
    except (pa.ArrowException, OSError, EOFError) as error:
        raise StorageError(
            f"cannot {what} {uri}: {error}",
            hint="The file may be truncated or damaged: write it again from its source, or leave it out.",
        ) from error
