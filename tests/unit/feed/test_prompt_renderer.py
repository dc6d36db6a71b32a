import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from nightmill.errors import RowError, RowErrorCode, ValidationError
from nightmill.rows.messages import clean_messages
from nightmill_worker.feed.chat import PromptRenderer, PromptText
from nightmill_worker.feed.template import ChatTemplate
from nightmill_worker.feed.tokenizer import Tokenizer

_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def _tokenizer(template: str | None = _TEMPLATE) -> Tokenizer:
    compiled = None if template is None else ChatTemplate(template, {})
    return Tokenizer(Backend(models.BPE()), special_tokens={}, eos_token_ids=(), template=compiled)


def test_a_prompt_as_a_chat() -> None:
    renderer = PromptRenderer(_tokenizer(), system_prompt="S")
    assert renderer.render("P", None) == PromptText("<system>S<user>P<assistant>", add_special_tokens=False)


def test_a_rows_own_system_message_goes_before_the_jobs() -> None:
    renderer = PromptRenderer(_tokenizer(), system_prompt="S")
    user = {"role": "user", "content": "P"}
    assert renderer.render(None, [user]).text == "<system>S<user>P<assistant>"
    own = {"role": "system", "content": "own"}
    assert renderer.render(None, [own, user]).text == "<system>own<user>P<assistant>"
    assert renderer.render(None, [{**own, "role": "developer"}, user]).text == "<developer>own<user>P<assistant>"


@pytest.mark.parametrize(("template", "chat"), [(None, None), (_TEMPLATE, False)])
def test_plain_text(template: str | None, chat: bool | None) -> None:
    plain = PromptRenderer(_tokenizer(template), chat=chat)
    assert plain.render("P", None) == PromptText("P", add_special_tokens=True)
    with_system = PromptRenderer(_tokenizer(template), system_prompt="S", chat=chat)
    assert with_system.render("P", None).text == "S\n\nP"
    with pytest.raises(RowError) as caught:
        plain.render(None, [{"role": "user", "content": "P"}])
    assert caught.value.code == RowErrorCode.INVALID_MESSAGES


def test_a_row_may_overrule_the_job() -> None:
    assert PromptRenderer(_tokenizer()).render("P", None, chat=False) == PromptText("P", add_special_tokens=True)
    assert PromptRenderer(_tokenizer(), chat=False).render("P", None, chat=True).text == "<user>P<assistant>"


def test_chat_needs_a_template() -> None:
    with pytest.raises(ValidationError, match="--no-chat"):
        PromptRenderer(_tokenizer(None), chat=True)


@pytest.mark.parametrize("role", ["usr", "System", "", None])
def test_an_unknown_role(role: str | None) -> None:
    with pytest.raises(RowError, match="message 1: unknown role") as caught:
        PromptRenderer(_tokenizer()).render(None, [{"role": "user", "content": "a"}, {"role": role, "content": "b"}])
    assert caught.value.code == RowErrorCode.INVALID_MESSAGES


def test_a_template_that_refuses_is_a_template_error() -> None:
    renderer = PromptRenderer(_tokenizer("{{ raise_exception('System role not supported') }}"), system_prompt="S")
    with pytest.raises(RowError, match="System role not supported") as caught:
        renderer.render("P", None)
    assert caught.value.code == RowErrorCode.TEMPLATE_ERROR


def test_case_I011_keys_a_row_never_had_do_not_reach_the_template(tmp_path: Path) -> None:
    """Arrow gives every message the union of all keys: row B must render as it does from JSONL."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    row_a: list[dict[str, Any]] = [
        {"role": "user", "content": "a", "name": "ann"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
    ]
    row_b: list[dict[str, Any]] = [{"role": "user", "content": "what is 2+2?"}]
    table = pa.table({"messages": [row_a, row_b]})
    assert "tool_calls" in table["messages"].to_pylist()[1][0]  # the trap is set
    renderer = PromptRenderer(_tokenizer("{{ messages | tojson }}"))
    for padded, written in zip(table["messages"].to_pylist(), (row_a, row_b), strict=True):
        from_arrow = renderer.render(None, clean_messages(padded)).text
        from_jsonl = renderer.render(None, clean_messages(json.dumps(written))).text
        assert json.loads(from_arrow) == json.loads(from_jsonl) == written
    assert (
        renderer.render(None, clean_messages(table["messages"].to_pylist()[1])).text
        == renderer.render(None, clean_messages(json.dumps(row_b))).text
    )
