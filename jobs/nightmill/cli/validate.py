"""`nightmill validate`: what will become of an input, before anything runs. Needs no GPU, and no model either."""

from dataclasses import asdict

import click

from nightmill.cli.job_options import text_or_file
from nightmill.cli.lengths import choose_ruler, show_lengths
from nightmill.cli.show import json_option, show_fields, show_json, show_note, show_table
from nightmill.errors import ExitCode
from nightmill.records import JobSpec, ModelSpec
from nightmill.storage import absolute
from nightmill.validate import ValidationReport, validate_inputs


@click.command(epilog="Example: nightmill validate prompts/ --prompt-column text --model demo")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("-o", "--output", default="./nightmill-out", hidden=True)
@click.option("--prompt-column", metavar="NAME", help="Column with the prompts.  [default: prompt]")
@click.option("--messages-column", metavar="NAME", help="Column with chat messages.  [default: messages]")
@click.option("--output-column", default="completion", show_default=True, metavar="NAME", help="For the text.")
@click.option("--output-prefix", default="", metavar="TEXT", help="Before the name of every column we add.")
@click.option("--allow-duplicate-ids", is_flag=True, help="Accept a custom_id that stands in several rows.")
@click.option("--shard-rows", type=click.IntRange(1), default=2000, show_default=True, help="Rows of an output part.")
@click.option("--model", metavar="MODEL", help="Count prompt lengths in its tokens; needs nightmill[worker].")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub model.")
@click.option("--system-prompt", metavar="TEXT|@FILE", help="Counted with every row that has no system message.")
@click.option("--chat/--no-chat", default=None, help="Use the chat template.  [default: when the model has one]")
@json_option
def validate(
    inputs: tuple[str, ...],
    output: str,
    prompt_column: str | None,
    messages_column: str | None,
    output_column: str,
    output_prefix: str,
    allow_duplicate_ids: bool,
    shard_rows: int,
    model: str | None,
    revision: str | None,
    system_prompt: str | None,
    chat: bool | None,
    as_json: bool,
) -> int:
    """Read every row as a worker would and say what will become of it.

    Exit code 0: the job can be submitted (single rows may still fail); 3: it cannot.
    """
    spec = JobSpec(
        inputs=tuple(absolute(name) for name in inputs),
        output=absolute(output),
        model=ModelSpec(model=model or "-", revision=revision),
        system_prompt=text_or_file(system_prompt),
        chat=chat,
        prompt_column=prompt_column,
        messages_column=messages_column,
        output_column=output_column,
        output_prefix=output_prefix,
        allow_duplicate_ids=allow_duplicate_ids,
    )
    ruler = choose_ruler(spec, model)
    report = validate_inputs(spec, shard_rows=shard_rows, count_tokens=ruler.count)
    if as_json:
        show_json(_report_object(report, ruler.unit))
    else:
        _show_report(report)
        if report.token_lengths is not None:
            show_lengths(ruler.unit, report.token_lengths)
    return ExitCode.VALIDATION if report.duplicates else ExitCode.DONE


def _report_object(report: ValidationReport, unit: str) -> dict[str, object]:
    return {
        "ok": not report.duplicates,
        "rows": report.num_rows,
        "bytes": report.size_bytes,
        "files": [source.uri for source in report.plan.sources],
        "shards": len(report.plan.shards),
        "output_columns": report.plan.output_schema.names,
        "error_codes": report.error_codes,
        "lengths": None if report.token_lengths is None else {"unit": unit, **asdict(report.token_lengths)},
        "problems": [asdict(problem) for problem in report.problems],
        "duplicates": [asdict(duplicate) for duplicate in report.duplicates],
    }


def _show_report(report: ValidationReport) -> None:
    columns = report.plan.columns
    num_failing = sum(report.error_codes.values())
    show_fields(
        {
            "files": len(report.plan.sources),
            "rows": report.num_rows,
            "bytes": report.size_bytes,
            "shards": len(report.plan.shards),
            "prompts": "OpenAI batch requests" if columns.openai else columns.prompt or columns.messages,
            "will fail": ", ".join(f"{code} {count:,}" for code, count in report.error_codes.items()) or None,
            "output columns": ", ".join(report.plan.output_schema.names),
        }
    )
    if report.problems:
        show_note(f"\nRows that will come back with an error (the first {len(report.problems)} of {num_failing:,}):")
        rows = [(p.source_file, p.row_index, p.code, p.message) for p in report.problems]
        show_table(("FILE", "ROW", "CODE", "MESSAGE"), rows)
    for duplicate in report.duplicates:
        show_note(f"duplicate custom_id {duplicate.custom_id!r}: {duplicate.first} and {duplicate.second}")
    if report.duplicates:
        show_note("Make the ids unique, or pass --allow-duplicate-ids: row_index still tells rows apart.")
