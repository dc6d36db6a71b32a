"""The text of a finished sequence."""

from nightmill_worker.engine.request import Finished
from nightmill_worker.feed.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def completion_text(tokenizer: Tokenizer, finished: Finished) -> str:
    """What the model said: without special tokens, without what stopped it, without half a character.

    A stop string is cut where it completed: one that was complete before min_tokens stays in the text.
    """
    token_ids = finished.token_ids
    if isinstance(finished.stop_match, int) and token_ids and token_ids[-1] == finished.stop_match:
        return tokenizer.decode(token_ids[:-1])  # special tokens vanish anyway, a stop token may be a word
    text = tokenizer.decode(token_ids)
    if isinstance(finished.stop_match, str):
        return _cut(text, finished.stop_match, before=tokenizer.decode(token_ids[:-1]))
    pending = tokenizer.pending_bytes(token_ids)
    if pending and text.endswith(_REPLACEMENT):
        # Byte-level decoders show an unfinished character as one replacement, byte-fallback ones as one a byte.
        return text[:-1] if tokenizer.is_byte_level else text.removesuffix(_REPLACEMENT * pending)
    return text


def _cut(text: str, stop: str, *, before: str) -> str:
    """Cut at the stop string that the last token completed; `before` is the text without that token."""
    settled = len(before.rstrip(_REPLACEMENT))
    at = text.find(stop, max(0, settled - len(stop) + 1))
    return text if at < 0 else text[:at]
