"""`nightmill errors`: the rows of a job that have no completion, and why."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nightmill.cli.find import find_job, job_argument, open_store
from nightmill.cli.show import json_option, show_json, show_note, show_table
from nightmill.errors import RowErrorCode
from nightmill.reader import reading
from nightmill.records import CommittedShard, JobInfo
from nightmill.storage import open_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """One row without a completion."""

    source_file: str
    row_index: int
    custom_id: str
    error_code: str
    error_message: str


@click.command(
    "errors", epilog="Example: nightmill errors answers/ --code context_length_exceeded --json | jq .custom_id"
)
@job_argument
@click.option("--code", type=click.Choice([code.value for code in RowErrorCode]), help="Only rows with this code.")
@click.option("--limit", type=click.IntRange(1), help="At most this many rows.")
@click.option("--counts", is_flag=True, help="Only how many rows have each code.")
@json_option
def row_errors(job: str | None, code: str | None, limit: int | None, counts: bool, as_json: bool) -> None:
    """List the rows of a job that have an error_code: of parts that are committed.

    With --json: one object a line, for each row.
    """
    with open_store() as store:
        info = find_job(store, job)
        shards = store.shard_results(info.job_id)
    if counts:
        _show_counts(info, as_json=as_json)
        return
    found = _limited(_failed_rows(info, shards, code), limit)
    if as_json:
        for row in found:
            show_json(asdict(row))
        return
    rows = [(r.source_file, r.row_index, r.custom_id, r.error_code, r.error_message) for r in found]
    show_table(("FILE", "ROW", "CUSTOM_ID", "CODE", "MESSAGE"), rows)
    if len(shards) < info.num_shards:
        show_note(f"{info.num_shards - len(shards)} of {info.num_shards} shards are not committed yet")


def _show_counts(info: JobInfo, *, as_json: bool) -> None:
    if as_json:
        show_json(info.error_codes)
    else:
        show_table(("CODE", "ROWS"), sorted(info.error_codes.items()))


def _limited(rows: Iterator[FailedRow], limit: int | None) -> Iterator[FailedRow]:
    for number, row in enumerate(rows):
        if limit is not None and number >= limit:
            return
        yield row


def _failed_rows(info: JobInfo, shards: list[CommittedShard], code: str | None) -> Iterator[FailedRow]:
    storage = open_storage(info.spec.output)
    prefix = info.spec.output_prefix
    names = {name: prefix + name for name in ("source_file", "row_index", "error_code", "error_message")}
    for shard in shards:
        if not shard.result.error_codes or (code and code not in shard.result.error_codes):
            continue
        uri = shard.result.part_uri
        with reading(uri), storage.open_input(uri) as stream:
            file = pq.ParquetFile(stream)
            own = prefix + "custom_id"
            columns = {**names, "custom_id": own if own in file.schema_arrow.names else "custom_id"}
            for batch in file.iter_batches(columns=list(columns.values())):
                codes = batch.column(columns["error_code"])
                failed = batch.filter(pc.equal(codes, code) if code else pc.is_valid(codes)).to_pydict()
                lists = [failed[columns[name]] for name in FailedRow.__slots__]
                for source_file, row_index, custom_id, error_code, message in zip(*lists, strict=True):
                    yield FailedRow(
                        source_file=source_file,
                        row_index=row_index,
                        custom_id=f"{source_file}#{row_index}" if custom_id is None else str(custom_id),
                        error_code=error_code,
                        error_message=message,
                    )
