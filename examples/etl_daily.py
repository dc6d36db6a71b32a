"""A daily step of a pipeline: submit, wait, join the completions on custom_id.

    python examples/etl_daily.py prompts.parquet out/ --model demo --date 2026-11-29

Run it twice: the idempotency key and the output are made from the date, so the second run finds the first one's job
and does no work again. A scheduler may therefore retry it as often as it likes. It needs `pip install nightmill`, no
torch and no GPU: the workers have those. Exit codes are those of `nightmill wait`.
"""

import argparse
import logging
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nightmill import Client
from nightmill.errors import NightmillError
from nightmill.outcome import exit_code

log = logging.getLogger("etl_daily")


def main() -> int:
    """The step; its exit code."""
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    source, completions = arguments.input, f"{arguments.out.rstrip('/')}/completions/{arguments.date}"
    with Client() as client:
        job = client.submit(
            source,
            completions,
            arguments.model,
            system_prompt="Answer in one short sentence.",
            max_tokens=32,
            idempotency_key=f"etl-daily-{arguments.date}",
            max_failed_rows=100,
        )
        log.info("job %s", job.id)
        info = job.wait(timeout=arguments.timeout)
        if exit_code(info) != 0:
            log.error("job %s is %s: %s", job.id, info.status.value, info.error_message or info.error_codes)
            return exit_code(info)
        for row in job.errors().to_pylist():
            log.warning("%(source_file)s row %(row_index)s: %(error_code)s: %(error_message)s", row)
        answers = job.results(columns=["custom_id", "completion", "finish_reason"])
    joined = join(pq.read_table(source), answers)
    target = Path(arguments.out, f"joined-{arguments.date}.parquet")
    pq.write_table(joined, target)
    log.info("%d rows, %d with a completion: %s", joined.num_rows, info.rows.completed, target)
    return 0


def join(records: pa.Table, answers: pa.Table) -> pa.Table:
    """Every record, with its completion where there is one; in the records' order."""
    positions = pa.array(range(records.num_rows), pa.int64())
    joined = records.append_column("_position", positions).join(answers, keys="custom_id", join_type="left outer")
    return joined.sort_by("_position").drop_columns(["_position"])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="Parquet with the columns prompt and custom_id")
    parser.add_argument("out", help="a folder: completions/<date>/ and joined-<date>.parquet go below it")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--date", required=True, help="the schedule's logical date, not today")
    parser.add_argument("--timeout", default="6h")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NightmillError as error:  # 124: it has not ended in time and goes on; the next run waits on
        log.error("%s", error)
        sys.exit(error.exit_code)
