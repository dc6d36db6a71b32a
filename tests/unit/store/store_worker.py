"""A worker without an engine: claims shards, writes each part once, commits. Killed at will by test_store_processes.

Usage: store_worker.py DATABASE_URL WORKERS_DIR PARTS_DIR
Each claim takes one line from stdin; after its end claims are free.
"""

import os
import sys
from pathlib import Path

from nightmill.failpoint import failpoint
from nightmill.janitor import sweep
from nightmill.records import RowCounts, ShardLease, ShardProgress, ShardResult, TokenCounts
from nightmill.store import Store
from nightmill.worker_lock import WorkerLock, new_worker_id


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def write_part(lease: ShardLease, parts: Path) -> ShardResult:
    """Create-if-absent, and what is there already is adopted: what it says is committed."""
    part = parts / f"part-{lease.range.index:05}"
    draft = parts / f".draft-{lease.worker_id}"
    draft.write_text(f"{lease.worker_id} {lease.attempt}")
    try:
        os.link(draft, part)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    failpoint("after_part_put")
    rows = lease.range.num_rows
    return ShardResult(
        rows=RowCounts(total=rows, completed=rows),
        tokens=TokenCounts(),
        error_codes={},
        part_uri=str(part),
        part_bytes=part.stat().st_size,
        part_etag=part.read_text(),
    )


def main() -> None:
    url, workers, parts = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    store = Store(url)
    store.migrate()
    with WorkerLock(workers, new_worker_id()) as lock:
        while not all(store.begin_finalize(job.job_id) for job in store.jobs()):
            sweep(store, workers)
            for shard_id in store.available_shards(4):
                sys.stdin.readline()
                lease = store.claim(shard_id, lock.worker_id)
                if lease is None:
                    continue
                failpoint("after_claim")
                tell("claimed")
                store.heartbeat(lock.worker_id, {shard_id: ShardProgress(attempt=lease.attempt, rows_completed=1)})
                store.commit_shard(lease, write_part(lease, parts))
                failpoint("after_commit")
                tell("committed")
    store.close()
    tell("done")


if __name__ == "__main__":
    main()
