"""A shard's finished rows: durable in checkpoints, and in memory too while they are few, so that nobody reads back what
it has just written."""

from collections.abc import Sequence

from nightmill.output.checkpoint import CheckpointReader, CheckpointWriter
from nightmill.records import Completion

MAX_HELD_CHARS = 2**18  # of one attempt; a worker has up to 32 at work
ROW_CHARS = 256  # that a row costs beside its text


class ShardAnswers:
    """What earlier attempts have made durable, and what this one does. Not thread-safe."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._unflushed: list[int] = []  # row indices that the writer holds
        self._held: dict[int, Completion] | None = {}  # all of this attempt; None: too many
        self._held_chars = 0

    @property
    def pending(self) -> int:
        """Rows that are not durable yet."""
        return self._writer.pending

    @property
    def has_written(self) -> bool:
        """Whether this attempt has made rows durable."""
        return bool(self._writer.files)

    def add(self, completion: Completion) -> None:
        """Take a final row."""
        self._writer.add(completion)
        self._unflushed.append(completion.row_index)
        if self._held is not None:
            self._held[completion.row_index] = completion
            self._held_chars += ROW_CHARS + len(completion.text or "") + len(completion.logprobs or "")
            if self._held_chars > MAX_HELD_CHARS:
                self._held = None

    def flush(self) -> Sequence[int]:
        """Make all rows durable; returns the indices of those that were not."""
        self._writer.flush()
        settled, self._unflushed = self._unflushed, []
        return settled

    def all(self, earlier: CheckpointReader) -> dict[int, Completion]:
        """Every durable row of the shard by row_index, after the last `flush`.

        Args:
            earlier: Of the files that stood when this attempt began. Its rows count before ours.
        """
        if self._held is None:
            earlier.include(self._writer.files)
        return {**(self._held or {}), **earlier.read()}
