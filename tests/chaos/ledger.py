"""Which rows were durable when: read off the checkpoints that pass through the proxy to the store.

Guarantee 3 says that durable rows are never computed again. The judge of that may not be nightmill's own counting.
"""

import io
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow.parquet as pq

from deploy.native.faulty_s3 import SeenRequest

_CHECKPOINT = re.compile(r"/(?P<job>job-[^/]+)/shard-(?P<shard>\d+)/ckpt-(?P<attempt>\d+)-\d+\.parquet")
_FOLDER = re.compile(r"/(?P<job>job-[^/]+)/shard-(?P<shard>\d+)/")
ShardKey = tuple[str, int]  # job id, shard index


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that the store has accepted."""

    attempt: int
    at: float  # monotonic
    rows: frozenset[int]


@dataclass
class CheckpointLedger:
    """Give `observe` to the proxy."""

    checkpoints: dict[ShardKey, list[Checkpoint]] = field(default_factory=dict)
    listings: dict[ShardKey, list[float]] = field(default_factory=dict)  # an attempt lists its shard's at its claim
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def observe(self, request: SeenRequest, body: bytes, status: int) -> None:
        """Note a checkpoint, or a look for checkpoints."""
        if status != 200:
            return
        url = urlsplit(request.path)
        if request.method == "PUT" and (found := _CHECKPOINT.search(unquote(url.path))):
            rows = frozenset(pq.read_table(io.BytesIO(body), columns=["row_index"])["row_index"].to_pylist())
            with self._lock:
                made = Checkpoint(int(found["attempt"]), time.monotonic(), rows)
                self.checkpoints.setdefault((found["job"], int(found["shard"])), []).append(made)
        elif request.method == "GET" and "list-type=2" in url.query:
            prefix = parse_qs(url.query).get("prefix", [""])[0]
            if found := _FOLDER.search(f"/{prefix}"):
                with self._lock:
                    self.listings.setdefault((found["job"], int(found["shard"])), []).append(time.monotonic())

    def durable_rows_computed_again(self, attempts: Mapping[ShardKey, int]) -> int:
        """Rows that were durable when a shard's last attempt looked, and that it computed all the same.

        Args:
            attempts: The number of each shard's last attempt. Only that one is judged: nobody has looked after it, so
                the last look before its first checkpoint was its own.
        """
        again = 0
        for key, attempt in attempts.items():
            own = [made for made in self.checkpoints.get(key, []) if made.attempt == attempt]
            if not own:
                continue
            first = min(made.at for made in own)
            looked = max((at for at in self.listings.get(key, []) if at < first), default=None)
            if looked is None:
                raise AssertionError(f"attempt {attempt} of {key} has written checkpoints without looking for others")
            earlier = [made for made in self.checkpoints[key] if made.attempt < attempt and made.at < looked]
            durable = frozenset[int]().union(*(made.rows for made in earlier))
            again += len(durable & frozenset[int]().union(*(made.rows for made in own)))
        return again
