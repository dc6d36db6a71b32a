"""The rows of a part as a stream of tables: source columns as they are, ours beside them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from nightmill.errors import RowErrorCode, StorageError
from nightmill.output.checkpoint import check_final, to_batch
from nightmill.output.part_reader import PartRow
from nightmill.reader import RowBatch
from nightmill.records import Completion, JobSpec, RowCounts, ShardRange, TokenCounts
from nightmill.rows.parse import custom_ids
from nightmill.seeds import column_seed
from nightmill.sharding import source_name

ROW_GROUP_BYTES = 32 * 2**20
"""In memory, before encoding: what a part's writer holds."""

_CLOSED_EARLY = frozenset({RowErrorCode.BATCH_CANCELLED.value, RowErrorCode.BATCH_EXPIRED.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """What a closer writes for rows that have no completion."""

    code: RowErrorCode
    message: str


class PartRows:
    """Joins a shard's source rows (`source`) with their completions, and counts them as they pass."""

    def __init__(
        self,
        shard: ShardRange,
        completions: Mapping[int, Completion],
        *,
        spec: JobSpec,
        model: str,
        source_schema: pa.Schema,
        unanswered: Unanswered | None = None,
        kept: Mapping[int, PartRow] | None = None,
        source: Callable[[], Iterator[RowBatch]],
    ) -> None:
        self._shard = shard
        self._completions = completions
        self._spec = spec
        self._model = model
        self._source_schema = source_schema
        self._unanswered = unanswered
        self._kept = kept or {}
        self._source = source
        self._source_name = source_name(spec.inputs, shard.source_file)
        self._rows: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._error_codes: Counter[str] = Counter()

    @property
    def counts(self) -> RowCounts:
        """Of the rows that have passed."""
        return RowCounts(total=self._rows.total(), **self._rows)

    @property
    def tokens(self) -> TokenCounts:
        """Of the rows that have passed and have a completion."""
        return TokenCounts(**self._tokens)

    @property
    def error_codes(self) -> dict[str, int]:
        """Of the rows that have passed."""
        return dict(sorted(self._error_codes.items()))

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        """All rows in order, in tables of about ROW_GROUP_BYTES. Where they are cut depends on the rows alone."""
        batches: list[pa.RecordBatch] = []
        num_bytes = 0
        for batch in self._source():
            batches.append(self._joined(batch, schema))
            num_bytes += batches[-1].nbytes
            if num_bytes >= ROW_GROUP_BYTES:
                yield pa.Table.from_batches(batches, schema)
                batches, num_bytes = [], 0
        if batches:
            yield pa.Table.from_batches(batches, schema)

    def _joined(self, batch: RowBatch, schema: pa.Schema) -> pa.RecordBatch:
        completions = [
            self._completion(batch.row_start + position, custom_id)
            for position, custom_id in enumerate(custom_ids(batch, self._spec))
        ]
        source = [_cast(batch.columns.column(field.name), field.type) for field in self._source_schema]
        ours = self._columns(completions)
        prefix = self._spec.output_prefix
        appended = [ours[field.name.removeprefix(prefix)] for field in list(schema)[len(self._source_schema) :]]
        return pa.RecordBatch.from_arrays([*source, *appended], schema=schema)

    def _completion(self, row_index: int, custom_id: str) -> Completion:
        kept = self._kept.get(row_index)
        completion = self._completions.get(row_index) if kept is None else kept.completion
        if (
            kept is not None and not kept.is_answered
        ):  # it may have been written without its source, and named by its place
            completion = replace(kept.completion, custom_id=custom_id)
        if completion is None:
            if self._unanswered is None:
                raise StorageError(f"row {row_index} of {self._shard.source_file} has no completion")
            completion = Completion(
                row_index=row_index,
                custom_id=custom_id,
                error_code=self._unanswered.code.value,
                error_message=self._unanswered.message,
            )
        check_final(completion)
        if (completion.row_index, completion.custom_id) != (row_index, custom_id):
            raise StorageError(
                f"row {row_index} of {self._shard.source_file} has the id {custom_id!r}, "
                f"but was answered as {completion.custom_id!r}",
                hint="The input was changed under the job. Put the old file back, or start a new job.",
            )
        self._count(completion)
        return completion

    def _count(self, completion: Completion) -> None:
        if completion.error_code is not None:
            self._rows["cancelled" if completion.error_code in _CLOSED_EARLY else "failed"] += 1
            self._error_codes[str(completion.error_code)] += 1
            return
        self._rows["completed"] += 1
        self._tokens["prompt"] += completion.prompt_tokens or 0
        self._tokens["completion"] += completion.completion_tokens or 0
        self._tokens["cached"] += completion.cached_tokens or 0

    def _columns(self, completions: list[Completion]) -> dict[str, pa.Array]:
        """Ours by their names without the prefix; the text goes by the job's name for it."""
        columns = {field.name: column for field, column in _fields_of(to_batch(completions))}
        columns[self._spec.output_column] = columns.pop("text")
        seeds = [None if c.seed is None else column_seed(c.seed) for c in completions]
        columns["seed"] = pa.array(seeds, pa.int64())
        columns["source_file"] = pa.array([self._source_name] * len(completions), pa.string())
        kept = (self._kept.get(c.row_index) for c in completions)
        columns["model"] = pa.array([row.model if row else self._model for row in kept], pa.string())
        return columns


def _fields_of(batch: pa.RecordBatch) -> Iterator[tuple[pa.Field, pa.Array]]:
    return zip(batch.schema, batch.columns, strict=True)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type.equals(kind) else column.cast(kind)
