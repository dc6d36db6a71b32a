"""What the engine gives back, as the row's final answer: text without the stop, logprobs in OpenAI's form."""

import json
from collections.abc import Sequence

from nightmill.errors import EngineError, RowErrorCode
from nightmill.records import Completion
from nightmill_worker.engine.request import Finished, FinishReason, TokenLogprobs
from nightmill_worker.feed.detokenize import completion_text
from nightmill_worker.feed.requests import RowRequest
from nightmill_worker.feed.tokenizer import Tokenizer


def completion_of(made: RowRequest, finished: Finished, tokenizer: Tokenizer, *, attempt: int) -> Completion:
    """The completion of a sequence that has ended with an answer or with the engine's error.

    Raises:
        EngineError: It was aborted: that is no answer, the row must run again.
    """
    row, request = made.row, made.request
    if finished.finish_reason is FinishReason.ABORT:
        raise EngineError(f"row {row.row_index} was aborted by somebody else")
    if finished.finish_reason is FinishReason.ERROR:
        return error_completion(made, RowErrorCode.ENGINE_ERROR, finished.error or "unknown", attempt=attempt)
    return Completion(
        row_index=row.row_index,
        custom_id=row.custom_id,
        text=completion_text(tokenizer, finished),
        finish_reason=finished.finish_reason.value,
        prompt_tokens=finished.num_prompt_tokens,
        completion_tokens=len(finished.token_ids),
        cached_tokens=finished.num_cached_tokens,
        attempts=attempt,
        seed=row.seed,
        max_tokens_effective=request.sampling.max_tokens,
        logprobs=None if finished.logprobs is None else _logprobs(finished.logprobs, tokenizer),
    )


def error_completion(made: RowRequest, code: RowErrorCode, message: str, *, attempt: int) -> Completion:
    """The completion of a row that has no answer."""
    return Completion(
        row_index=made.row.row_index,
        custom_id=made.row.custom_id,
        error_code=code.value,
        error_message=message,
        attempts=attempt,
        seed=made.row.seed,
        max_tokens_effective=made.request.sampling.max_tokens,
    )


def _logprobs(positions: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> str:
    content = [
        {
            **_token(tokenizer, position.token_id, position.logprob),
            "top_logprobs": [_token(tokenizer, token_id, logprob) for token_id, logprob in position.top],
        }
        for position in positions
    ]
    return json.dumps({"content": content}, ensure_ascii=False)


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    text = tokenizer.decode([token_id])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "token_id": token_id}
