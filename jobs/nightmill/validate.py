"""What can be said about a job's input before anything runs: without a GPU, without torch, in bounded memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from nightmill.duplicates import DuplicateId, find_duplicate_ids
from nightmill.errors import ValidationError
from nightmill.reader import InputColumns, read_shard, resolve_columns
from nightmill.records import Completion, JobSpec, ShardRange, SourceFile
from nightmill.rows import InputRow, job_source_schema, output_schema, parse_rows
from nightmill.sharding import DEFAULT_SHARD_ROWS, list_sources, plan_shards
from nightmill.storage import Storage
from nightmill.submit import PlanProgress, say_nothing

MAX_EXAMPLES = 10
CountTokens = Callable[[Sequence[InputRow]], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan:
    """An input that fits the row contract, cut into shards."""

    sources: tuple[SourceFile, ...]
    shards: tuple[ShardRange, ...]
    source_schema: pa.Schema  # of all files together; every part begins with it
    output_schema: pa.Schema
    columns: InputColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """A row that will come back with an error."""

    source_file: str
    row_index: int
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLengths:
    """Prompt lengths in tokens, of the rows that can run."""

    num_rows: int
    total: int
    minimum: int
    median: int
    p95: int
    maximum: int
    histogram: tuple[tuple[int, int], ...]  # (upper bound, a power of two, inclusive; rows), ascending, none empty


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """What `nightmill validate` shows."""

    plan: InputPlan
    num_rows: int
    size_bytes: int
    error_codes: dict[str, int]
    problems: tuple[RowProblem, ...]  # the first MAX_EXAMPLES
    duplicates: tuple[DuplicateId, ...]  # the first MAX_EXAMPLES; empty when ids are not checked
    token_lengths: TokenLengths | None


def plan_input(
    spec: JobSpec, *, shard_rows: int = DEFAULT_SHARD_ROWS, check_ids: bool = True, storage: Storage | None = None
) -> InputPlan:
    """Find, check and cut a job's input: footers, and the id column alone.

    Args:
        spec: Of the job.
        shard_rows: Target rows of a shard.
        check_ids: False: leave duplicate ids to the caller, whatever the spec says.
        storage: Of the inputs; None: by their uris.

    Raises:
        ValidationError: nothing can be submitted as it is; says which file, column or rows, and what to do.
        StorageError: a file cannot be read.
    """
    sources = list_sources(spec.inputs, output=spec.output, storage=storage)
    source_schema = check_sources(spec, sources, check_ids=check_ids, storage=storage)
    return InputPlan(
        sources=sources,
        shards=plan_shards(sources, shard_rows, storage=storage),
        source_schema=source_schema,
        output_schema=output_schema(source_schema, spec),
        columns=resolve_columns(source_schema, spec, where=sources[0].uri),
    )


def check_sources(
    spec: JobSpec,
    sources: Sequence[SourceFile],
    *,
    check_ids: bool = True,
    storage: Storage | None = None,
    progress: PlanProgress = say_nothing,
) -> pa.Schema:
    """Check files that were found already; returns the schema of all of them together.

    Args:
        spec: Of the job.
        sources: What `list_sources` has found.
        check_ids: As for `plan_input`.
        storage: Of the inputs; None: by their uris.
        progress: Told what is done to how many files of how many.

    Raises:
        ValidationError, StorageError: as `plan_input`.
    """
    read_schema, read_ids = partial(progress, "reading columns"), partial(progress, "looking for duplicate ids")
    source_schema = job_source_schema(sources, spec, storage=storage, progress=read_schema)
    output_schema(source_schema, spec)
    resolve_columns(source_schema, spec, where=sources[0].uri)
    if check_ids and spec.check_ids and not spec.allow_duplicate_ids:
        refuse_duplicates(find_duplicate_ids(sources, spec, limit=3, storage=storage, progress=read_ids))
    return source_schema


def refuse_duplicates(duplicates: Sequence[DuplicateId]) -> None:
    """Raise when there are any.

    Raises:
        ValidationError: names an id and both of its rows.
    """
    if not duplicates:
        return
    lines = [f"custom_id {d.custom_id!r} stands in {d.first} and again in {d.second}" for d in duplicates]
    raise ValidationError(
        "\n  ".join(lines), hint="Make the ids unique, or pass --allow-duplicate-ids: row_index still tells rows apart."
    )


def validate_inputs(
    spec: JobSpec,
    *,
    shard_rows: int = DEFAULT_SHARD_ROWS,
    count_tokens: CountTokens | None = None,
    storage: Storage | None = None,
) -> ValidationReport:
    """Read every row as a worker would, and tell what will become of it.

    Args:
        spec: Of the job.
        shard_rows: Target rows of a shard.
        count_tokens: Prompt tokens of a batch of rows; None: lengths are not told.
        storage: Of the inputs; None: by their uris.

    Raises:
        ValidationError: the input as a whole does not fit. Duplicate ids are in the report instead.
        StorageError: a file cannot be read.
    """
    plan = plan_input(spec, shard_rows=shard_rows, check_ids=False, storage=storage)
    error_codes: Counter[str] = Counter()
    problems: list[RowProblem] = []
    lengths: Counter[int] = Counter()
    for shard in plan.shards:
        for batch in read_shard(shard, spec, storage=storage):
            runnable: list[InputRow] = []
            for row in parse_rows(batch, spec):
                if isinstance(row, InputRow):
                    runnable.append(row)
                    continue
                error_codes[str(row.error_code)] += 1
                if len(problems) < MAX_EXAMPLES:
                    problems.append(_problem(row, batch.source_file))
            if count_tokens is not None and runnable:
                lengths.update(count_tokens(runnable))
    checked = spec.check_ids and not spec.allow_duplicate_ids
    return ValidationReport(
        plan=plan,
        num_rows=sum(source.num_rows for source in plan.sources),
        size_bytes=sum(source.size_bytes for source in plan.sources),
        error_codes=dict(sorted(error_codes.items())),
        problems=tuple(problems),
        duplicates=find_duplicate_ids(plan.sources, spec, limit=MAX_EXAMPLES, storage=storage) if checked else (),
        token_lengths=summarize_lengths(lengths) if lengths else None,
    )


def _problem(row: Completion, source_file: str) -> RowProblem:
    return RowProblem(
        source_file=source_file,
        row_index=row.row_index,
        code=str(row.error_code),
        message=row.error_message or "",
    )


def summarize_lengths(lengths: Counter[int]) -> TokenLengths:
    """Summarise {tokens: rows}; at least one row."""
    num_rows = lengths.total()
    ordered = sorted(lengths.items())

    def quantile(share: float) -> int:
        below = 0
        for length, rows in ordered:
            below += rows
            if below >= share * num_rows:
                return length
        return ordered[-1][0]

    histogram: Counter[int] = Counter()
    for length, rows in ordered:
        histogram[1 << max(length - 1, 0).bit_length()] += rows
    return TokenLengths(
        num_rows=num_rows,
        total=sum(length * rows for length, rows in ordered),
        minimum=ordered[0][0],
        median=quantile(0.5),
        p95=quantile(0.95),
        maximum=ordered[-1][0],
        histogram=tuple(sorted(histogram.items())),
    )
