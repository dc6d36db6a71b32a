"""The work of a chaos run: one bulk job, and a stream of small urgent ones beside it."""

import io
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.chaos.verdict import Expected

from deploy.native.s3 import S3Endpoint
from nightmill.client import Client, Job
from nightmill.errors import NightmillError

BULK_TOKENS, URGENT_TOKENS = 8, 4
URGENT_ROWS, URGENT_EVERY_S = 20, 1.5


def answer(prompt: str, max_tokens: int) -> str:
    """What the scripted engine says."""
    last = [int(word) for word in prompt.split()]
    length = len(last)
    for _ in range(max_tokens):
        last.append(2 + (last[-1] * 31 + len(last) * 7) % 97)
    return " ".join(str(token) for token in last[length:])


@dataclass
class Load:
    """Inputs go straight to the store; jobs are submitted as a pipeline would, again and again until they are taken."""

    client: Client
    store: S3Endpoint
    bucket: str
    prefix: str  # of this run, in the bucket
    jobs: dict[str, tuple[Job, Expected]] = field(default_factory=dict)
    asked_at: dict[str, float] = field(default_factory=dict)  # wall clock, at the first try

    def __post_init__(self) -> None:
        self._s3: Any = self.store.client()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="urgent")

    def submit_bulk(self, rows: int) -> None:
        """In parts of 500 rows."""
        self._submit("bulk", rows, BULK_TOKENS, tier="normal", shard_rows=500)

    def start_urgent(self) -> None:
        """Until `stop_urgent`: a job of the high tier every now and then."""
        self._thread.start()

    def stop_urgent(self) -> None:
        """No more of them."""
        self._stop.set()
        self._thread.join()
        self._s3.close()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(URGENT_EVERY_S):
            number += 1
            self._submit(f"urgent-{number}", URGENT_ROWS, URGENT_TOKENS, tier="high", shard_rows=URGENT_ROWS)

    def _submit(self, name: str, rows: int, max_tokens: int, *, tier: str, shard_rows: int) -> None:
        prompts = [f"{10 + i % 900} {11 + i % 800} {12 + i % 700}" for i in range(rows)]
        ids = [f"{name}-{i}" for i in range(rows)]
        self._put(f"{self.prefix}/{name}.parquet", pa.table({"custom_id": ids, "prompt": prompts}), shard_rows)
        self.asked_at[name] = time.time()
        where = f"s3://{self.bucket}/{self.prefix}/{name}"
        while True:
            try:
                job = self.client.submit(
                    f"{where}.parquet",
                    f"{where}-out",
                    "fake",
                    max_tokens=max_tokens,
                    tier=tier,
                    shard_rows=shard_rows,
                    idempotency_key=where,
                )
            except NightmillError:  # as a scheduler does: the key makes the next try the same job
                time.sleep(0.3)
                continue
            break
        answers = {i: answer(prompt, max_tokens) for i, prompt in zip(ids, prompts, strict=True)}
        self.jobs[name] = (job, Expected(answers, max_tokens))

    def _put(self, key: str, table: pa.Table, rows: int) -> None:
        body = io.BytesIO()
        pq.write_table(table, body, row_group_size=rows)
        while True:
            try:
                self._s3.put_object(Bucket=self.bucket, Key=key, Body=body.getvalue())
            except Exception:  # noqa: BLE001 - botocore has no common base for "not now"; the input must be there
                time.sleep(0.3)
            else:
                return
