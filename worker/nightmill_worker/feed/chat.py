"""A row's prompt or messages, with the job's system prompt, as the text the model reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nightmill.errors import RowError, RowErrorCode, ValidationError
from nightmill_worker.feed.tokenizer import Tokenizer

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


@dataclass(frozen=True, slots=True)
class PromptText:
    """What to encode."""

    text: str
    add_special_tokens: bool  # False for a rendered chat: its template wrote them


class PromptRenderer:
    """Renders one job's rows: as a chat, or as plain text for models without a chat template and `--no-chat`."""

    def __init__(self, tokenizer: Tokenizer, *, system_prompt: str | None = None, chat: bool | None = None) -> None:
        """Decide once how rows are rendered.

        Args:
            tokenizer: The model's.
            system_prompt: Goes before every row that brings no system message of its own.
            chat: None: whenever the model has a chat template.

        Raises:
            ValidationError: `chat` asked for and the model has no chat template.
        """
        if chat and not tokenizer.has_chat_template:
            raise ValidationError("--chat: the model has no chat template", hint="leave it out, or pass --no-chat")
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._chat = tokenizer.has_chat_template if chat is None else chat

    def render(
        self, prompt: str | None, messages: Sequence[Mapping[str, Any]] | None, *, chat: bool | None = None
    ) -> PromptText:
        """Render a row that has one of `prompt` and `messages`, cleaned as `nightmill.rows` does it.

        `chat` overrides the job's choice for this row. Plain text is the system prompt, an empty line, the prompt.

        Raises:
            RowError: `invalid_messages` for an unknown role or messages that cannot be plain text, `template_error`
                when the model's template refuses them.
        """
        as_chat = self._tokenizer.has_chat_template and (self._chat if chat is None else chat)
        if as_chat:
            conversation = [{"role": "user", "content": prompt}] if messages is None else messages
            return PromptText(self._tokenizer.render_chat(self._with_system(conversation)), add_special_tokens=False)
        if messages is not None:
            raise RowError(
                RowErrorCode.INVALID_MESSAGES,
                "messages need a chat template, and this model has none or --no-chat is on; use a prompt column",
            )
        text = prompt or ""
        return PromptText(f"{self._system_prompt}\n\n{text}" if self._system_prompt else text, add_special_tokens=True)

    def _with_system(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        for position, message in enumerate(messages):
            if message.get("role") not in ROLES:
                # Many templates write any role without complaint: the model would be shown a role it never saw.
                raise RowError(
                    RowErrorCode.INVALID_MESSAGES,
                    f"message {position}: unknown role {message.get('role')!r}; known: {', '.join(sorted(ROLES))}",
                )
        has_own = any(message["role"] in ("system", "developer") for message in messages)
        if self._system_prompt and not has_own:
            return [{"role": "system", "content": self._system_prompt}, *messages]
        return list(messages)
