"""Tokenised requests that have not been handed to the engine: per tier, each owner (a shard) in turn.

The engine must never wait for the tokenizer, and memory must not grow with the job, so what waits here and what is in
the engine are bounded together, in requests and in prompt tokens, each tier for itself: a low tier that has filled its
part holds up nobody. Not thread-safe: its owner holds the lock.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

from nightmill.states import Tier
from nightmill_worker.engine.request import Request


class Lookahead:
    """Bounded queues of requests, each with an owner (a shard's mailbox).

    Args:
        max_requests: Of a tier, here and in the engine together.
        max_tokens: Prompt tokens, the same.
        min_requests: May be held whatever their tokens: long prompts must not starve the engine.
    """

    def __init__(self, *, max_tokens: int, max_requests: int, min_requests: int = 0) -> None:
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._min_requests = min_requests
        self._waiting: dict[Tier, OrderedDict[int, deque[Request]]] = {tier: OrderedDict() for tier in Tier}
        self._num_waiting = 0
        self._num_requests = dict.fromkeys(Tier, 0)  # waiting and taken
        self._num_tokens = dict.fromkeys(Tier, 0)

    def __len__(self) -> int:
        return self._num_waiting

    def num_tokens(self, tier: Tier) -> int:
        """Prompt tokens of the tier, here and in the engine."""
        return self._num_tokens[tier]

    def has_room(self, tier: Tier) -> bool:
        """Whether more may be added. One batch may overshoot: a prompt larger than the bound must pass too."""
        num_requests = self._num_requests[tier]
        return num_requests < self._max_requests and (
            num_requests < self._min_requests or self._num_tokens[tier] < self._max_tokens
        )

    def add(self, owner: int, requests: Iterable[Request]) -> None:
        """Append, whatever the bound: ask `has_room` first."""
        for request in requests:
            self._queue(owner, request.tier).append(request)
            self._num_waiting += 1
            self._count(request, +1)

    def take(self, count: int | None = None) -> list[tuple[int, Request]]:
        """Remove and return up to `count` entries (None: all), the urgent tiers first, owners in turn.

        They count against the bound until they are `done` or put back.
        """
        taken: list[tuple[int, Request]] = []
        for owners in self._waiting.values():
            while owners and (count is None or len(taken) < count):
                owner, queue = owners.popitem(last=False)
                taken.append((owner, queue.popleft()))
                if queue:
                    owners[owner] = queue  # behind the others
        self._num_waiting -= len(taken)
        return taken

    def put_back(self, entries: Iterable[tuple[int, Request]]) -> None:
        """Return taken entries to the front, in their order: they have not run, or the engine died with them."""
        for owner, request in reversed(list(entries)):
            self._queue(owner, request.tier).appendleft(request)
            self._waiting[request.tier].move_to_end(owner, last=False)
            self._num_waiting += 1

    def done(self, request: Request) -> None:
        """A taken request has ended: it makes room."""
        self._count(request, -1)

    def withdraw(self, owner: int) -> list[Request]:
        """Remove and return everything of one owner that was not taken."""
        withdrawn = [request for owners in self._waiting.values() for request in owners.pop(owner, ())]
        self._num_waiting -= len(withdrawn)
        for request in withdrawn:
            self._count(request, -1)
        return withdrawn

    def _queue(self, owner: int, tier: Tier) -> deque[Request]:
        return self._waiting[tier].setdefault(owner, deque())

    def _count(self, request: Request, sign: int) -> None:
        self._num_requests[request.tier] += sign
        self._num_tokens[request.tier] += sign * len(request.prompt)
