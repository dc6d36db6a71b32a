"""Jobs with nothing in the engine: which of them to forget, in a process that serves thousands."""

from collections import Counter, OrderedDict

_NUM_KEPT = 256
"""A job's next shard may still come, and what was learnt from the others is worth something to it."""


class IdleJobs:
    """Counts the live requests of each job. O(1) for each of them."""

    def __init__(self, num_kept: int = _NUM_KEPT) -> None:
        self._num_kept = num_kept
        self._live: Counter[str] = Counter()
        self._idle: OrderedDict[str, None] = OrderedDict()

    def begin(self, job_id: str) -> None:
        """A request of the job has come."""
        self._live[job_id] += 1
        self._idle.pop(job_id, None)

    def end(self, job_id: str) -> list[str]:
        """A request of the job has left: jobs to forget now, the longest idle."""
        self._live[job_id] -= 1
        if self._live[job_id] == 0:
            del self._live[job_id]
            self._idle[job_id] = None
        forgotten = []
        while len(self._idle) > self._num_kept:
            forgotten.append(self._idle.popitem(last=False)[0])
        return forgotten
