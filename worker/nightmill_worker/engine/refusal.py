"""What an engine can never run, whatever else it runs."""

from nightmill_worker.engine.page_pool import PagePool
from nightmill_worker.engine.request import Request


def reason_to_refuse(
    request: Request, *, max_model_len: int, pool: PagePool, vocab_size: int, has_text: bool
) -> str | None:
    """Why a request cannot be taken, for its error row; None: it can.

    Args:
        request: Any.
        max_model_len: Tokens that a sequence may have.
        pool: It must hold the prompt; what the answer takes besides shows later.
        vocab_size: Token ids are below it.
        has_text: Token ids can be turned into text.
    """
    length, max_tokens = len(request.prompt), request.sampling.max_tokens
    if length == 0:
        return "the prompt has no tokens"
    if length + max_tokens > max_model_len:
        return (
            f"the prompt has {length} tokens and max_tokens is {max_tokens}; "
            f"together they may be at most {max_model_len} (max_model_len)"
        )
    if pool.num_pages(length) > pool.num_usable:
        usable, size = pool.num_usable, pool.page_size
        return f"the prompt has {length} tokens; the page pool holds {usable * size} ({usable} pages of {size})"
    if min(request.prompt) < 0 or max(request.prompt) >= vocab_size:
        return f"the prompt has token ids outside the vocabulary of {vocab_size}"
    if max(request.sampling.stop_token_ids, default=0) >= vocab_size:
        return f"stop_token_ids holds {max(request.sampling.stop_token_ids)}, outside the vocabulary of {vocab_size}"
    if request.sampling.stop and not has_text:
        return "stop strings need a tokenizer; this engine was started without one"
    return None
