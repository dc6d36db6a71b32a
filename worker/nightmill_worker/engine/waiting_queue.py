"""Sequences that do not run, per tier. Every operation is O(1), however many wait."""

from collections import deque

from nightmill.states import Tier
from nightmill_worker.engine.prefix_index import Node
from nightmill_worker.engine.sequence import Sequence, SequenceState


class WaitingQueue:
    """Per tier: the preempted first, then the others in the order they were added; parked ones stand aside.

    A cancelled sequence stays where it is until it comes to the front: its state says that it is finished.
    """

    def __init__(self) -> None:
        self._resumes: dict[int, deque[Sequence]] = {tier.rank: deque() for tier in Tier}
        self._fresh: dict[int, deque[Sequence]] = {tier.rank: deque() for tier in Tier}
        self._num_live = 0  # waiting or parked
        self.num_parked = 0

    def __len__(self) -> int:
        return self._num_live

    @property
    def ranks(self) -> list[int]:
        """Tier ranks, the most urgent first."""
        return list(self._fresh)

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence at its tier's end."""
        self._fresh[sequence.request.tier.rank].append(sequence)
        self._num_live += 1

    def push_preempted(self, sequence: Sequence) -> None:
        """Add a sequence that was taken off. Victims come latest first, so the front keeps admission order."""
        sequence.state = SequenceState.WAITING
        self._resumes[sequence.request.tier.rank].appendleft(sequence)
        self._num_live += 1

    def head(self, rank: int) -> Sequence | None:
        """The next sequence of a tier, or None."""
        for queue in (self._resumes[rank], self._fresh[rank]):
            while queue:
                if queue[0].state is SequenceState.WAITING:
                    return queue[0]
                queue.popleft()
        return None

    def pop(self, rank: int) -> Sequence:
        """Take the sequence that `head` has just shown."""
        queue = self._resumes[rank]
        sequence = (queue or self._fresh[rank]).popleft()
        self._num_live -= 1
        return sequence

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
            rank = sequence.request.tier.rank
            (self._resumes if sequence.num_preemptions else self._fresh)[rank].appendleft(sequence)

    def discard(self, sequence: Sequence) -> None:
        """A waiting or parked sequence is about to be finished: count it out."""
        self._num_live -= 1
        if sequence.state is SequenceState.PARKED:
            self.num_parked -= 1
