"""Rows to requests: render, tokenise a batch at a time, check against the model's context, clamp."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nightmill.errors import RowError, RowErrorCode, ValidationError
from nightmill.records import Completion, JobSpec
from nightmill.rows import InputRow
from nightmill.states import Tier
from nightmill_worker.engine.request import Request
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
    ) -> None:
        """Decide once how prompts are rendered.

        Args:
            tokenizer: The model's.
            spec: Of the job; its `chat`, `system_prompt` and `strict` matter here.
            job_id: Goes into every request.
            tier: Goes into every request.
            max_model_len: Prompt and completion tokens a sequence may have.
            request_ids: Shared by all makers that feed one engine.

        Raises:
            ValidationError: `--chat` for a model without a chat template.
        """
        if spec.chat and not tokenizer.has_chat_template:
            raise ValidationError("--chat: the model has no chat template", hint="Leave it out, or pass --no-chat.")
        self._tokenizer = tokenizer
        self._spec = spec
        self._job_id = job_id
        self._tier = tier
        self._max_model_len = max_model_len
        self._ids = request_ids or itertools.count()
        self._chat = tokenizer.has_chat_template if spec.chat is None else spec.chat

    def make(self, rows: Sequence[InputRow]) -> list[RowRequest | Completion]:
        """Requests in the order of the rows; a Completion with its error code for a row that cannot run."""
        made: dict[int, RowRequest | Completion] = {}
        texts: dict[bool, dict[int, str]] = {True: {}, False: {}}
        for index, row in enumerate(rows):
            chat = self._chat if row.chat is None else row.chat
            try:
                texts[chat][index] = self._text(row, chat=chat)
            except RowError as error:
                made[index] = _failed(row, error)
        for chat, batch in texts.items():
            for index, token_ids in zip(batch, self._encode(list(batch.values()), chat=chat), strict=True):
                try:
                    made[index] = RowRequest(rows[index], self._request(rows[index], token_ids))
                except RowError as error:
                    made[index] = _failed(rows[index], error)
        return [made[index] for index in range(len(rows))]

    def _text(self, row: InputRow, *, chat: bool) -> str:
        if chat and self._tokenizer.has_chat_template:
            return self._tokenizer.render_chat(self._messages(row))
        if row.messages is not None:
            raise RowError(
                RowErrorCode.TEMPLATE_ERROR, "messages need a chat template, and this model has none or --no-chat is on"
            )
        system = self._spec.system_prompt
        return f"{system}\n\n{row.prompt}" if system else row.prompt or ""

    def _messages(self, row: InputRow) -> list[Mapping[str, Any]]:
        messages: list[Mapping[str, Any]] = (
            [{"role": "user", "content": row.prompt}] if row.messages is None else list(row.messages)
        )
        system = self._spec.system_prompt
        # A row's own system message goes before the job's.
        if system and not (messages and messages[0].get("role") == "system"):
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def _encode(self, texts: list[str], *, chat: bool) -> Iterator[list[int] | RowError]:
        """Tokens of each text; the error of one that the tokenizer cannot take."""
        # A template writes the special tokens itself; a plain prompt gets the tokenizer's.
        try:
            yield from self._tokenizer.encode_batch(texts, add_special_tokens=not chat) if texts else []
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            if len(texts) == 1:  # Rust's panics are no Exception
                yield RowError(RowErrorCode.ENGINE_ERROR, f"the tokenizer failed: {error}")
                return
            for text in texts:
                yield from self._encode([text], chat=chat)

    def _request(self, row: InputRow, token_ids: list[int] | RowError) -> Request:
        if isinstance(token_ids, RowError):
            raise token_ids
        room = self._max_model_len - len(token_ids)
        sampling = row.sampling
        if not token_ids:
            raise RowError(RowErrorCode.EMPTY_PROMPT, "the prompt has no tokens")
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
