"""Stop strings over a growing list of tokens, at bounded cost per token."""

from collections.abc import Callable, Sequence

Detokenize = Callable[[Sequence[int]], str]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING = 8
"""A character spans at most four byte tokens; past this the bytes are simply not UTF-8 and are taken as they are."""


class StopStrings:
    """Finds the first stop string in the text of the tokens pushed so far.

    Only a tail is detokenised: the last settled tokens (context for tokenizers whose text depends on the left
    neighbour) and those whose text is not settled yet, because a character is still missing bytes.
    """

    __slots__ = ("_carry", "_detokenize", "_keep", "_num_settled", "_searched", "_settled_text", "_stops", "_window")

    def __init__(self, stops: tuple[str, ...], detokenize: Detokenize) -> None:
        self._stops = stops
        self._detokenize = detokenize
        self._keep = max(len(stop) for stop in stops) - 1
        self._carry = ""  # the last characters before the window: a stop may begin there
        self._window: list[int] = []
        self._num_settled = 0  # tokens at the window's start whose text is in `_carry` already
        self._settled_text = ""  # the text of those
        self._searched = 0  # characters after `_settled_text` that were searched before

    def push(self, token: int, *, armed: bool) -> str | None:
        """Add a token; return the stop string it completed, the one that begins first.

        Args:
            token: The token just drawn.
            armed: False while min_tokens is not reached: a stop completed now does not count, now or later.
        """
        self._window.append(token)
        text = self._detokenize(self._window)
        fresh = text[len(self._settled_text) :]
        found = self._search(fresh) if armed else None
        self._searched = len(fresh.rstrip(_REPLACEMENT))
        if not text.endswith(_REPLACEMENT) or len(self._window) - self._num_settled > _MAX_PENDING:
            self._settle(fresh)
        return found

    def _search(self, fresh: str) -> str | None:
        text = self._carry + fresh
        seen = len(self._carry) + self._searched
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, seen - len(stop) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        return None if best is None else best[1]

    def _settle(self, fresh: str) -> None:
        self._carry = (self._carry + fresh)[-self._keep :] if self._keep else ""
        self._window = self._window[self._num_settled :]
        self._num_settled = len(self._window)
        self._settled_text = self._detokenize(self._window)
        self._searched = 0
