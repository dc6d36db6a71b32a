"""The first completions of a job, to look at: `nightmill results --limit N`."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click
import pyarrow.parquet as pq

from nightmill.cli.show import show_json
from nightmill.reader import reading
from nightmill.records import CommittedShard, JobInfo
from nightmill.storage import open_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRow:
    """One output row, without its source columns."""

    custom_id: str
    completion: str | None
    finish_reason: str | None
    error_code: str | None


def show_first_rows(info: JobInfo, shards: list[CommittedShard], limit: int, *, as_json: bool) -> None:
    """Print up to `limit` rows of the committed parts, in order."""
    for number, row in enumerate(_rows(info, shards, limit)):
        if as_json:
            show_json(asdict(row))
            continue
        click.echo(("\n" if number else "") + click.style(row.custom_id, bold=True))
        if row.error_code is not None:
            click.echo(click.style(row.error_code, fg="red"))
        else:
            cut = click.style(" … (cut by max_tokens)", dim=True) if row.finish_reason == "length" else ""
            click.echo(f"{row.completion}{cut}")


def _rows(info: JobInfo, shards: list[CommittedShard], limit: int) -> Iterator[FirstRow]:
    storage = open_storage(info.spec.output)
    prefix, left = info.spec.output_prefix, limit
    for shard in shards:
        uri = shard.result.part_uri
        with reading(uri), storage.open_input(uri) as stream:
            file = pq.ParquetFile(stream)
            own = prefix + "custom_id"
            names = {
                "custom_id": own if own in file.schema_arrow.names else "custom_id",
                "source_file": prefix + "source_file",
                "row_index": prefix + "row_index",
                "completion": prefix + info.spec.output_column,
                "finish_reason": prefix + "finish_reason",
                "error_code": prefix + "error_code",
            }
            for batch in file.iter_batches(batch_size=min(left, 1024), columns=list(names.values())):
                columns = [batch.column(name).to_pylist() for name in names.values()]
                for custom_id, source_file, row_index, completion, finish_reason, error_code in zip(
                    *columns, strict=True
                ):
                    yield FirstRow(
                        custom_id=f"{source_file}#{row_index}" if custom_id is None else str(custom_id),
                        completion=completion,
                        finish_reason=finish_reason,
                        error_code=error_code,
                    )
                    left -= 1
                    if left == 0:
                        return
