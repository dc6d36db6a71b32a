"""Sequences that do not run, per tier. Every operation is O(log n) or better, however many wait."""

from collections import deque
from collections.abc import Callable

from nightmill.states import Tier
from nightmill_worker.engine.ordering import TierQueue
from nightmill_worker.engine.prefix_index import Node
from nightmill_worker.engine.sequence import Sequence, SequenceState


class WaitingQueue:
    """Per tier: the preempted first, then those whose wait for a prefix is over, then the others as their order says.

    Parked ones stand aside, and so do those passed by in a step because they did not fit. A cancelled one of the first
    two kinds stays where it is until it comes to the front: its state says that it is finished.
    """

    def __init__(self, make_tier: Callable[[], TierQueue]) -> None:
        self._resumes: dict[int, deque[Sequence]] = {tier.rank: deque() for tier in Tier}
        self._unparked: dict[int, deque[Sequence]] = {tier.rank: deque() for tier in Tier}
        self._fresh: dict[int, TierQueue] = {tier.rank: make_tier() for tier in Tier}
        self._by_id: dict[int, Sequence] = {}  # the fresh ones
        self._passed: list[Sequence] = []  # in this step, first to be passed first
        self._num_ready: dict[int, int] = {tier.rank: 0 for tier in Tier}  # live and not parked
        self._num_live = 0  # waiting or parked
        self.num_parked = 0

    def __len__(self) -> int:
        return self._num_live

    @property
    def ranks(self) -> list[int]:
        """Tier ranks, the most urgent first."""
        return list(self._fresh)

    def num_ready(self, rank: int) -> int:
        """Sequences of a tier that wait and are not parked."""
        return self._num_ready[rank]

    def push(self, sequence: Sequence, expected_tokens: int) -> None:
        """Add a new sequence; `expected_tokens` of answer are predicted."""
        request = sequence.request
        path = [node.uid for node in sequence.nodes]
        self._fresh[request.tier.rank].add(
            request.request_id, request.job_id, path, len(request.prompt), expected_tokens
        )
        self._by_id[request.request_id] = sequence
        self._count(sequence, +1)

    def push_preempted(self, sequence: Sequence) -> None:
        """Add a sequence that was taken off. Victims come latest first, so the front keeps admission order."""
        sequence.state = SequenceState.WAITING
        self._resumes[sequence.request.tier.rank].appendleft(sequence)
        self._count(sequence, +1)

    def head(self, rank: int) -> Sequence | None:
        """The next sequence of a tier, or None."""
        for queue in (self._resumes[rank], self._unparked[rank]):
            while queue:
                if queue[0].state is SequenceState.WAITING:
                    return queue[0]
                queue.popleft()
        first = self._fresh[rank].head(1)
        return self._by_id[first[0]] if first else None

    def pop(self, rank: int) -> Sequence:
        """Take the sequence that `head` has just shown."""
        queue = self._resumes[rank] or self._unparked[rank]
        if queue:
            sequence = queue.popleft()
        else:
            key = self._fresh[rank].head(1)[0]
            self._fresh[rank].remove(key)
            sequence = self._by_id.pop(key)
        self._count(sequence, -1)
        return sequence

    def pass_by(self, rank: int) -> None:
        """Set the sequence that `head` has just shown aside until `take_back`; it counts as waiting."""
        sequence = self.pop(rank)
        self._count(sequence, +1)
        self._passed.append(sequence)

    def take_back(self) -> None:
        """Put those passed by back to the front of their queues, in the order in which they were."""
        if self._passed:
            self._to_front(self._passed)
            self._passed = []

    def park(self, rank: int, node: Node) -> None:
        """Set the sequence that `head` has just shown aside until the node's page is published or its writer leaves."""
        sequence = self.pop(rank)
        self._num_live += 1
        self.num_parked += 1
        sequence.state = SequenceState.PARKED
        node.waiters.append(sequence)

    def unpark(self, sequences: list[Sequence]) -> None:
        """Put parked sequences back to the front of their queues, in the order given."""
        parked = [sequence for sequence in sequences if sequence.state is SequenceState.PARKED]  # others: cancelled
        for sequence in parked:
            sequence.state = SequenceState.WAITING
            self.num_parked -= 1
            self._num_ready[sequence.request.tier.rank] += 1
        self._to_front(parked)

    def discard(self, sequence: Sequence) -> None:
        """A waiting or parked sequence is about to be finished: count it out."""
        if sequence.state is SequenceState.PARKED:
            self._num_live -= 1
            self.num_parked -= 1
            return
        self._count(sequence, -1)
        if self._by_id.pop(sequence.request.request_id, None) is not None:
            self._fresh[sequence.request.tier.rank].remove(sequence.request.request_id)

    def settle(self, sequence: Sequence, expected_tokens: int) -> None:
        """A sequence has ended: its job was booked `expected_tokens` of answer and is to be charged what it got."""
        request = sequence.request
        self._fresh[request.tier.rank].settle(request.job_id, len(sequence.generated) - expected_tokens)

    def forget_job(self, job_id: str) -> None:
        """Drop what is kept of a job; it must have nothing waiting."""
        for queue in self._fresh.values():
            queue.forget_job(job_id)

    def _to_front(self, sequences: list[Sequence]) -> None:
        for sequence in reversed(sequences):
            queues = self._resumes if sequence.num_preemptions else self._unparked
            queues[sequence.request.tier.rank].appendleft(sequence)

    def _count(self, sequence: Sequence, change: int) -> None:
        self._num_live += change
        self._num_ready[sequence.request.tier.rank] += change
