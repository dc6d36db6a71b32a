"""Rows to requests: render, tokenise a batch at a time, check against the model's context, clamp."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nightmill.errors import RowError, RowErrorCode
from nightmill.records import Completion, JobSpec
from nightmill.rows import InputRow
from nightmill.states import Tier
from nightmill_worker.engine.request import Request
from nightmill_worker.feed.chat import PromptRenderer
from nightmill_worker.feed.prefix import PrefixEncoder
from nightmill_worker.feed.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A row and the request made of it."""

    row: InputRow
    request: Request


class RequestMaker:
    """Makes one job's requests. Used by several shard threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: JobSpec,
        *,
        job_id: str,
        tier: Tier,
        max_model_len: int,
        request_ids: Iterator[int] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Decide once how prompts are rendered.

        Args:
            tokenizer: The model's.
            spec: Of the job; its `chat`, `system_prompt` and `strict` matter here.
            job_id: Goes into every request.
            tier: Goes into every request.
            max_model_len: Prompt and completion tokens a sequence may have.
            request_ids: Shared by all makers that feed one engine.
            vocab_size: Of the model: token ids are below it. None: not known, and not looked at.

        Raises:
            ValidationError: `--chat` for a model without a chat template.
        """
        self._tokenizer = tokenizer
        self._spec = spec
        self._job_id = job_id
        self._tier = tier
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._ids = request_ids or itertools.count()
        self._renderer = PromptRenderer(tokenizer, system_prompt=spec.system_prompt, chat=spec.chat)
        self._prefixes = PrefixEncoder(tokenizer)

    def make(self, rows: Sequence[InputRow]) -> list[RowRequest | Completion]:
        """Requests in the order of the rows; a Completion with its error code for a row that cannot run."""
        made: dict[int, RowRequest | Completion] = {}
        # A template writes the special tokens itself; plain text gets the tokenizer's.
        texts: dict[bool, dict[int, str]] = {True: {}, False: {}}
        for index, row in enumerate(rows):
            try:
                rendered = self._renderer.render(row.prompt, row.messages, chat=row.chat)
            except RowError as error:
                made[index] = _failed(row, error)
            else:
                texts[rendered.add_special_tokens][index] = rendered.text
        for special, batch in texts.items():
            for index, token_ids in zip(batch, self._encode(list(batch.values()), special), strict=True):
                try:
                    made[index] = RowRequest(rows[index], self._request(rows[index], token_ids))
                except RowError as error:
                    made[index] = _failed(rows[index], error)
        return [made[index] for index in range(len(rows))]

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int] | RowError]:
        """Tokens of each text; the error of one that the tokenizer cannot take."""
        if not texts:
            return []
        try:
            encoder = self._tokenizer if add_special_tokens else self._prefixes
            return list(encoder.encode_batch(texts))
        except BaseException as error:  # Rust's panics are no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            if len(texts) == 1:
                return [RowError(RowErrorCode.ENGINE_ERROR, f"the tokenizer failed: {error}")]
            return [one for text in texts for one in self._encode([text], add_special_tokens)]

    def _request(self, row: InputRow, token_ids: list[int] | RowError) -> Request:
        if isinstance(token_ids, RowError):
            raise token_ids
        room = self._max_model_len - len(token_ids)
        sampling = row.sampling
        if not token_ids:
            raise RowError(RowErrorCode.EMPTY_PROMPT, "the prompt has no tokens")
        if self._vocab_size is not None and max(sampling.stop_token_ids, default=0) >= self._vocab_size:
            raise RowError(
                RowErrorCode.INVALID_SAMPLING_PARAMS,
                f"stop_token_ids holds {max(sampling.stop_token_ids):,}; the model's token ids are below "
                f"{self._vocab_size:,}",
            )
        if room < 1:
            raise RowError(
                RowErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {len(token_ids):,} tokens; the model's context is {self._max_model_len:,} "
                "and must hold at least one more",
            )
        if sampling.max_tokens > room:
            if self._spec.strict:
                raise RowError(
                    RowErrorCode.CONTEXT_LENGTH_EXCEEDED,
                    f"the prompt has {len(token_ids):,} tokens, so only {room:,} of max_tokens "
                    f"{sampling.max_tokens:,} fit into the model's context of {self._max_model_len:,} (--strict)",
                )
            sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        return Request(
            request_id=next(self._ids),
            job_id=self._job_id,
            tier=self._tier,
            prompt=tuple(token_ids),
            sampling=sampling,
            seed=row.seed,
            eos_token_ids=() if sampling.ignore_eos else self._tokenizer.eos_token_ids,
        )


def _failed(row: InputRow, error: RowError) -> Completion:
    return Completion(
        row_index=row.row_index,
        custom_id=row.custom_id,
        error_code=error.code,
        error_message=error.message,
        seed=row.seed,
    )
