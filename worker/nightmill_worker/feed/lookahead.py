"""Tokenised requests that wait in the feeder: bounded in tokens, fair to nobody, in the order they came.

The engine must never wait for the tokenizer, and memory must not grow with the job, so all shards together may hold
a fixed number of prompt tokens here. Not thread-safe: its owner holds the lock.
"""

from collections import deque
from collections.abc import Iterable

from nightmill_worker.engine.request import Request


class Lookahead:
    """A bounded queue of requests, each with an owner (a shard's mailbox)."""

    def __init__(self, *, max_tokens: int, max_requests: int) -> None:
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._waiting: deque[tuple[int, Request]] = deque()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens held."""
        return self._num_tokens

    @property
    def has_room(self) -> bool:
        """Whether more may be added. One batch may overshoot: a prompt larger than the bound must pass too."""
        return self._num_tokens < self._max_tokens and len(self._waiting) < self._max_requests

    def add(self, owner: int, requests: Iterable[Request]) -> None:
        """Append, whatever the bound: ask `has_room` first."""
        for request in requests:
            self._waiting.append((owner, request))
            self._num_tokens += len(request.prompt)

    def put_back(self, entries: Iterable[tuple[int, Request]]) -> None:
        """Return entries to the front, in their order: an engine died with them."""
        for owner, request in reversed(list(entries)):
            self._waiting.appendleft((owner, request))
            self._num_tokens += len(request.prompt)

    def take(self, count: int) -> list[tuple[int, Request]]:
        """Remove and return up to `count` entries, oldest first."""
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self._num_tokens -= sum(len(request.prompt) for _, request in taken)
        return taken

    def withdraw(self, owner: int) -> list[Request]:
        """Remove and return everything of one owner."""
        withdrawn = [request for name, request in self._waiting if name == owner]
        self._waiting = deque(entry for entry in self._waiting if entry[0] != owner)
        self._num_tokens -= sum(len(request.prompt) for request in withdrawn)
        return withdrawn
