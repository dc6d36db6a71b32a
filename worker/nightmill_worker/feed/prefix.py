"""Encoding many chats that begin alike: what they share is encoded once."""

import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

from nightmill_worker.feed.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MAX_SEGMENTS = 4096
_MAX_CHARACTERS = 8 << 20  # of all remembered segments


class PrefixEncoder:
    """Encodes rendered chats in segments that end with a special token, and remembers segments that come again.

    Special tokens are taken out of the text before anything else happens to it, so a text may be cut behind one:
    the ids of the segments, put together, are the ids of the whole. That holds for a token unless it eats the space
    behind it, counts only as a word of its own, or overlaps with another added token; those are not cut at. It does
    not hold at all for tokenizers that treat the very beginning of a text differently. What is left is checked
    against the whole encoding once per encoder.

    Safe to use from several threads.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cut = _cut_pattern(tokenizer)
        self._memory: OrderedDict[str, list[int]] = OrderedDict()
        self._num_characters = 0
        self._verified = False
        self._lock = Lock()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The same ids as `Tokenizer.encode_batch(texts, add_special_tokens=False)`, sooner."""
        if self._cut is None:
            return self._whole(texts)
        rows = [_segments(text, self._cut) for text in texts]
        known = self._encode_segments(rows)
        encoded = [[token_id for segment in row for token_id in known[segment]] for row in rows]
        if not self._verified and encoded:
            self._verified = True
            if encoded[0] != self._whole(texts[:1])[0]:
                logger.warning("this tokenizer cannot encode chats in segments; encoding them whole")
                self._cut = None
                return self._whole(texts)
        return encoded

    def _whole(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer.encode_batch(texts, add_special_tokens=False)

    def _encode_segments(self, rows: list[list[str]]) -> dict[str, list[int]]:
        counts = Counter(segment for row in rows for segment in row)
        known: dict[str, list[int]] = {}
        with self._lock:
            for segment in counts:
                ids = self._memory.get(segment)
                if ids is not None:
                    self._memory.move_to_end(segment)
                    known[segment] = ids
        fresh = [segment for segment in counts if segment not in known]
        known.update(zip(fresh, self._whole(fresh), strict=True) if fresh else ())
        with self._lock:
            # One that came once in this batch is somebody's own words: not worth remembering.
            self._remember((segment, known[segment]) for segment in fresh if counts[segment] > 1)
        return known

    def _remember(self, segments: Iterable[tuple[str, list[int]]]) -> None:
        for segment, ids in segments:
            if segment not in self._memory and len(segment) <= _MAX_CHARACTERS // 4:
                self._memory[segment] = ids
                self._num_characters += len(segment)
        while len(self._memory) > _MAX_SEGMENTS or self._num_characters > _MAX_CHARACTERS:
            oldest, _ = self._memory.popitem(last=False)
            self._num_characters -= len(oldest)


def _segments(text: str, cut: re.Pattern[str]) -> list[str]:
    """The text in pieces, each but the last ending with a special token."""
    segments, start = [], 0
    for match in cut.finditer(text):
        segments.append(text[start : match.end()])
        start = match.end()
    if start < len(text):
        segments.append(text[start:])
    return segments


def _cut_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches the special tokens that a text may be cut behind; None when there are none."""
    if _looks_at_the_beginning(tokenizer.backend):
        return None
    added = [token for token in tokenizer.backend.get_added_tokens_decoder().values() if not token.normalized]
    texts = [token.content for token in added]
    used = tokenizer.template_source
    named = set(tokenizer.special_tokens.values())
    safe = [
        token.content
        for token in added
        if token.special
        and not token.rstrip
        and not token.single_word
        and (token.content in used or token.content in named)
        and not any(_overlaps(other, token.content) for other in texts if other != token.content)
    ]
    return re.compile("|".join(re.escape(text) for text in sorted(safe, key=len, reverse=True))) if safe else None


def _looks_at_the_beginning(backend: Any) -> bool:
    """SentencePiece's newer form puts its space mark only at the beginning of the whole text."""
    return backend.pre_tokenizer is not None and b'"prepend_scheme":"first"' in backend.pre_tokenizer.__getstate__()


def _overlaps(other: str, token: str) -> bool:
    """True when a match of `other` could hold the end of `token` and go on, or hold its beginning and not its end."""
    if token in other[:-1]:
        return True
    return any(other.endswith(token[:length]) for length in range(1, len(token)))
