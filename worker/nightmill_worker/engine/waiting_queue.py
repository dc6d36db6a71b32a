"""Sequences that do not run, per tier. Every operation is O(log n) or better, however many wait."""

from collections import deque
from collections.abc import Callable

from nightmill.states import Tier
from nightmill_worker.engine.ordering import TierQueue
from nightmill_worker.engine.prefix_index import Node
from nightmill_worker.engine.sequence import Sequence, SequenceState


class WaitingQueue:
    """Per tier: the preempted first, then those whose wait for a prefix is over, then the others as their order says.

    Parked ones stand aside. A cancelled one of the first two kinds stays where it is until it comes to the front: its
    state says that it is finished.
    """

    def __init__(self, make_tier: Callable[[], TierQueue]) -> None:
        self._resumes: dict[int, deque[Sequence]] = {tier.rank: deque() for tier in Tier}
        self._unparked: dict[int, deque[Sequence]] = {tier.rank: deque() for tier in Tier}
        self._fresh: dict[int, TierQueue] = {tier.rank: make_tier() for tier in Tier}
        self._by_id: dict[int, Sequence] = {}  # the fresh ones
        self._num_live = 0  # waiting or parked
        self.num_parked = 0

    def __len__(self) -> int:
        return self._num_live

    @property
    def ranks(self) -> list[int]:
        """Tier ranks, the most urgent first."""
        return list(self._fresh)

    def push(self, sequence: Sequence, expected_tokens: int) -> None:
        """Add a new sequence; `expected_tokens` of answer are predicted."""
        request = sequence.request
        path = [node.uid for node in sequence.nodes]
        self._fresh[request.tier.rank].add(
            request.request_id, request.job_id, path, len(request.prompt), expected_tokens
        )
        self._by_id[request.request_id] = sequence
        self._num_live += 1

    def push_preempted(self, sequence: Sequence) -> None:
        """Add a sequence that was taken off. Victims come latest first, so the front keeps admission order."""
        sequence.state = SequenceState.WAITING
        self._resumes[sequence.request.tier.rank].appendleft(sequence)
        self._num_live += 1

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
        self._num_live -= 1
        queue = self._resumes[rank] or self._unparked[rank]
        if queue:
            return queue.popleft()
        key = self._fresh[rank].head(1)[0]
        self._fresh[rank].remove(key)
        return self._by_id.pop(key)

    def park(self, rank: int, node: Node) -> None:
        """Set the sequence that `head` has just shown aside until the node's page is published or its writer leaves."""
        sequence = self.pop(rank)
        self._num_live += 1
        self.num_parked += 1
        sequence.state = SequenceState.PARKED
        node.waiters.append(sequence)

    def unpark(self, sequences: list[Sequence]) -> None:
        """Put parked sequences back to the front of their queues, in the order given."""
        for sequence in reversed(sequences):
            if sequence.state is not SequenceState.PARKED:
                continue  # cancelled meanwhile
            sequence.state = SequenceState.WAITING
            self.num_parked -= 1
            queues = self._resumes if sequence.num_preemptions else self._unparked
            queues[sequence.request.tier.rank].appendleft(sequence)

    def discard(self, sequence: Sequence) -> None:
        """A waiting or parked sequence is about to be finished: count it out."""
        self._num_live -= 1
        if sequence.state is SequenceState.PARKED:
            self.num_parked -= 1
        elif self._by_id.pop(sequence.request.request_id, None) is not None:
            self._fresh[sequence.request.tier.rank].remove(sequence.request.request_id)

    def settle(self, sequence: Sequence, expected_tokens: int) -> None:
        """A sequence has ended: its job was booked `expected_tokens` of answer and is to be charged what it got."""
        request = sequence.request
        self._fresh[request.tier.rank].settle(request.job_id, len(sequence.generated) - expected_tokens)
