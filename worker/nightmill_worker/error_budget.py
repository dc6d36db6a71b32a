"""`--max-failed-rows` over a fleet: every worker counts what the store knows of the jobs it works on."""

import time
from collections.abc import Iterable

from nightmill.errors import ErrorBudgetExceededError
from nightmill.store import Store
from nightmill_worker.fleet_jobs import JobBook

EVERY_S = 2.0


class ErrorBudget:
    """Fails jobs that have lost more rows than they may; used by one thread."""

    def __init__(self, store: Store, book: JobBook) -> None:
        self._store = store
        self._book = book
        self._look_at = 0.0

    def look(self, job_ids: Iterable[str]) -> None:
        """Check these jobs, if the last check is old enough."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + EVERY_S
        for job_id in job_ids:
            limit = self._book.job(job_id).options.max_failed_rows
            if limit is None:
                continue
            failed = self._store.job(job_id).rows.failed
            if failed > limit:
                message = f"{failed:,} rows failed; --max-failed-rows allows {limit:,}"
                self._store.fail_job(job_id, ErrorBudgetExceededError.code, message)
