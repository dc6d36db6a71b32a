"""Chat templates: Jinja in a sandbox, with what transformers gives a template and nothing more."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nightmill.errors import ModelError, RowError, RowErrorCode


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, variables: Mapping[str, str], *, now: datetime | None = None) -> None:
        """Compile.

        Args:
            source: Jinja.
            variables: Special tokens by role (bos_token, …).
            now: What templates that print today's date see; None: the clock. A job resumed on another day has the
                same prompts only when this is fixed.

        Raises:
            ModelError: not a valid template.
        """
        self.source = source
        self._variables = dict(variables)
        try:
            self._compiled = _environment(now).from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid: {error}", hint="use --no-chat") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text that asks for an answer to `messages`.

        Raises:
            RowError: `template_error`: the template refused the messages (roles that do not alternate, an unknown
                role, content of a form it does not know).
        """
        try:
            return self._compiled.render(
                messages=[_with_reasoning_names(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError) as e:
            raise RowError(RowErrorCode.TEMPLATE_ERROR, f"the chat template refused the messages: {e}") from e


def load_chat_template(
    directory: Path, config: Mapping[str, Any], variables: Mapping[str, str], *, now: datetime | None = None
) -> ChatTemplate | None:
    """The default template: of chat_template.jinja, else chat_template.json, else tokenizer_config.json."""
    jinja_file = directory / "chat_template.jinja"
    json_file = directory / "chat_template.json"
    if jinja_file.is_file():
        source: Any = jinja_file.read_text(encoding="utf-8")
    elif json_file.is_file():
        source = json.loads(json_file.read_text(encoding="utf-8")).get("chat_template")
    else:
        source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}
    if isinstance(source, dict):
        source = source.get("default")
    return ChatTemplate(source, variables, now=now) if source else None


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates read reasoning under one of two names, inputs have it under one of three."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: datetime | None) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
