"""`nightmill results`: where the output is, or the output as OpenAI batch files."""

import os
import sys
from pathlib import Path
from typing import BinaryIO

import click

from nightmill.cli.find import find_job, job_argument, open_store
from nightmill.cli.first_rows import show_first_rows
from nightmill.cli.show import json_option, show_json, show_note
from nightmill.errors import StorageError
from nightmill.output.openai import write_openai_files
from nightmill.records import CommittedShard, JobInfo


@click.command(epilog="Example: nightmill results answers/ --openai results.jsonl --openai-errors errors.jsonl")
@job_argument
@click.option(
    "--openai", "results_path", metavar="FILE", help="Write completions as OpenAI batch output lines; - for stdout."
)
@click.option("--openai-errors", "errors_path", metavar="FILE", help="Write rows without a completion likewise.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Show the first N completions.")
@json_option
def results(
    job: str | None, results_path: str | None, errors_path: str | None, limit: int | None, as_json: bool
) -> None:
    """Print the output folder of a job; with --limit some completions, with --openai convert all of them.

    The parts are Parquet, one schema for all: read the folder with whatever reads Parquet.
    """
    with open_store() as store:
        info = find_job(store, job)
        shards = store.shard_results(info.job_id)
    if results_path or errors_path:
        _convert(info, results_path or os.devnull, errors_path or os.devnull)
    elif limit is not None:
        show_first_rows(info, shards, limit, as_json=as_json)
    elif as_json:
        show_json(_listing(info, shards))
    else:
        click.echo(info.spec.output)
    if len(shards) < info.num_shards:
        show_note(f"job {info.job_id} is {info.status.value}: {len(shards)} of {info.num_shards} parts are there")


def _listing(info: JobInfo, shards: list[CommittedShard]) -> dict[str, object]:
    parts = [{"uri": s.result.part_uri, "rows": s.result.rows.total, "bytes": s.result.part_bytes} for s in shards]
    return {"id": info.job_id, "status": info.status.value, "output": info.spec.output, "parts": parts}


def _convert(info: JobInfo, results_path: str, errors_path: str) -> None:
    try:
        with _open(results_path) as results_file, _open(errors_path) as errors_file:
            written = write_openai_files(
                info.spec.output,
                results_file,
                errors_file,
                spec=info.spec,
                job_id=info.job_id,
                created=int(info.created_at.timestamp()),
            )
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write the OpenAI files: {error}", hint="Give --openai another path.") from error
    show_note(f"{written.num_results:,} completions, {written.num_errors:,} errors")


def _open(path: str) -> BinaryIO:
    if path == "-":
        return os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    return Path(path).open("wb")
