"""The offline planner: which waiting request is admitted next.

Depth-first over the prefix tree, so that a prefix group runs together and its pages die together. Where that leaves a
choice: long expected decodes first once the end is in sight (the tail must not run at batch 3), before that
compute-heavy and memory-heavy requests in turn, so that prefill chunks ride on decode steps (BlendServe's idea), of
each kind the oldest: a file is finished from its beginning on, and the shards at work are few.
The answers are put back into input order by the shard writer.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from nightmill_worker.engine.fairness import JobShares
from nightmill_worker.engine.order_tree import Node, OrderTree, Pick, Waiting

_TAIL_FACTOR = 2
"""The end is in sight when the slots need less than this many longest decodes to finish what waits."""
_PATIENCE = 4 * 4096
"""A request that so many later ones have overtaken goes next (and its group with it): four look-ahead windows."""
_JUMP_EVERY = 64
"""Overdue requests interrupt a group at most this often, or they would break up the very groups they belong to."""


class TierQueue(Protocol):
    """The waiting requests of one tier in admission order."""

    def __len__(self) -> int: ...

    def add(self, key: int, job_id: str, path: Sequence[int], prompt_tokens: int, expected_tokens: int) -> None:
        """Let a request wait. `path`: interned uids of its prompt's full pages, `expected_tokens` ≥ 1."""
        ...

    def remove(self, key: int) -> None:
        """Take a request out because it was admitted or cancelled; unknown keys are an error (KeyError)."""
        ...

    def head(self, count: int) -> list[int]:
        """Up to `count` keys, next to admit first. Stable: keys stay in place until they are removed."""
        ...

    def settle(self, job_id: str, tokens: int) -> None:
        """Correct a job's booked service by what its finished request really took (± computed tokens)."""
        ...

    def forget_job(self, job_id: str) -> None:
        """Drop what is kept of a job that is over; it must have nothing waiting."""
        ...


class ArrivalQueue:
    """First come, first served, over all jobs."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: int, job_id: str, path: Sequence[int], prompt_tokens: int, expected_tokens: int) -> None:
        """See TierQueue."""
        self._keys[key] = None

    def remove(self, key: int) -> None:
        """See TierQueue."""
        del self._keys[key]

    def head(self, count: int) -> list[int]:
        """See TierQueue."""
        return [key for key, _ in zip(self._keys, range(count), strict=False)]

    def settle(self, job_id: str, tokens: int) -> None:
        """Arrival order knows no shares."""

    def forget_job(self, job_id: str) -> None:
        """Nothing is kept."""


class JobQueue:
    """The waiting requests of one job in planned order."""

    def __init__(self, slots: int, patience: int = _PATIENCE) -> None:
        self._tree = OrderTree()
        self._by_arrival: OrderedDict[int, Waiting] = OrderedDict()
        self._slots = slots
        self._patience = patience
        self._path: tuple[int, ...] = ()  # of the request issued last: where the depth-first walk stands
        self._issued = 0
        self._next_jump = 0
        # Tokens over all requests ever added, and the balance of those issued against that mix.
        self._prompt_seen = 0
        self._expected_seen = 0
        self._prompt_ahead = 0.0

    def __len__(self) -> int:
        return len(self._tree)

    def add(self, request: Waiting) -> None:
        """Let a request wait."""
        request.issued_at_arrival = self._issued
        self._prompt_seen += request.prompt_tokens
        self._expected_seen += request.expected_tokens
        self._tree.mix = self._mix
        self._tree.insert(request)
        self._by_arrival[request.key] = request

    def discard(self, request: Waiting) -> None:
        """Forget a request that was not issued."""
        self._tree.remove(request)
        del self._by_arrival[request.key]

    def issue(self) -> Waiting:
        """Take out the request that goes next; there must be one."""
        request = self._overdue() or self._next()
        self.discard(request)
        self._path = request.path
        self._issued += 1
        self._prompt_ahead += request.prompt_tokens - self._mix * request.expected_tokens
        return request

    @property
    def _mix(self) -> float:
        return self._prompt_seen / self._expected_seen

    def _next(self) -> Waiting:
        return self._tree.first(self._tree.nearest(self._path), self._rule())

    def _rule(self) -> Pick:
        root: Node = self._tree.root
        if root.expected_tokens <= _TAIL_FACTOR * self._slots * root.longest:
            return Pick.LONGEST
        return Pick.MEMORY if self._prompt_ahead > 0 else Pick.COMPUTE

    def _overdue(self) -> Waiting | None:
        if self._issued < self._next_jump:
            return None
        oldest = next(iter(self._by_arrival.values()))
        if self._issued - oldest.issued_at_arrival <= self._patience:
            return None
        self._next_jump = self._issued + _JUMP_EVERY
        return oldest


class PlannedQueue:
    """The waiting requests of one tier: each job in planned order, the jobs taking turns by service received."""

    def __init__(self, slots: int, patience: int = _PATIENCE) -> None:
        """`slots`: sequences that run at once, which tells how near the end is."""
        self._slots = slots
        self._patience = patience
        self._jobs: dict[str, JobQueue] = {}
        self._shares = JobShares()
        self._waiting: dict[int, Waiting] = {}
        self._issued: OrderedDict[int, Waiting] = OrderedDict()  # out of the trees, first to be admitted first
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: int, job_id: str, path: Sequence[int], prompt_tokens: int, expected_tokens: int) -> None:
        """See TierQueue."""
        request = Waiting(key, job_id, tuple(path), prompt_tokens, max(1, expected_tokens), self._arrivals)
        self._arrivals += 1
        self._waiting[key] = request
        if job_id not in self._jobs:
            self._jobs[job_id] = JobQueue(self._slots, self._patience)
        self._jobs[job_id].add(request)
        self._shares.join(job_id)

    def remove(self, key: int) -> None:
        """See TierQueue. A request that never came to the head gives back nothing: it was booked nothing."""
        request = self._waiting.pop(key)
        if self._issued.pop(key, None) is None:
            self._jobs[request.job_id].discard(request)
            self._retire_if_empty(request.job_id)

    def head(self, count: int) -> list[int]:
        """See TierQueue."""
        while len(self._issued) < count and (job_id := self._shares.next()) is not None:
            request = self._jobs[job_id].issue()
            self._issued[request.key] = request
            self._shares.charge(job_id, request.prompt_tokens + request.expected_tokens)
            self._retire_if_empty(job_id)
        return [key for key, _ in zip(self._issued, range(count), strict=False)]

    def settle(self, job_id: str, tokens: int) -> None:
        """See TierQueue."""
        self._shares.charge(job_id, tokens)

    def forget_job(self, job_id: str) -> None:
        """See TierQueue."""
        if not self._jobs.get(job_id):
            self._jobs.pop(job_id, None)

    def _retire_if_empty(self, job_id: str) -> None:
        # The queue stays: it remembers where its walk stands and what mix it has seen. It is small.
        if not self._jobs[job_id]:
            self._shares.leave(job_id)
