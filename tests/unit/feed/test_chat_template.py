"""Our renderer against transformers' on templates that use everything templates use."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from nightmill.errors import ModelError, RowError, RowErrorCode
from nightmill_worker.feed.template import ChatTemplate, load_chat_template

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "bos, date and tools": (
        "{{- bos_token }}\n{%- if not date_string is defined %}\n"
        "    {%- set date_string = strftime_now('%d %b %Y') %}\n{%- endif %}\n"
        "Today Date: {{ date_string }}\n{%- if tools is not none %}\n    {%- for t in tools %}\n"
        "{{- t | tojson(indent=4) }}\n    {%- endfor %}\n{%- endif %}\n"
        "{%- for message in messages %}\n{{- '<|start|>' + message.role + '<|end|>\n\n' }}"
        "{{- message.content | trim if message.content else '' }}\n{%- endfor %}"
    ),
    "namespace and loop controls": (
        "{% set ns = namespace(found=false, system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = m.content %}{% continue %}{% endif %}{% if ns.found %}{% break %}{% endif %}"
        "[INST] {{ ns.system ~ m.content }} [/INST]{% set ns.found = true %}{% endfor %}"
    ),
    "generation tag": (
        "{% for m in messages %}{% if m.role == 'assistant' %}\n  {% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}\n{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    ),
    "tojson of everything": "{{ messages | tojson }}|{{ messages[0] | tojson(sort_keys=true) }}|{{ '<&>é' | tojson }}",
    "reasoning": (
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content | default('-') }}/{{ m.thinking | default('-') }};"
        "{% endfor %}"
    ),
    "dict, slices and filters": (
        "{% for k, v in dict(a=1, b=2).items() %}{{ k }}{{ v }}{% endfor %}{{ messages[::-1][0].content[:3] | upper }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('+') }}"
    ),
    "macro and whitespace": (
        "{%- macro show(m) %}\n    <{{ m.role }}>\n{{ m.content }}\n{% endmacro %}\n{% for m in messages %}\n"
        "  {{ show(m) }}\n{% endfor %}\n\n"
    ),
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "What is 17*23?"}],
    "system": [{"role": "system", "content": "Be <terse> & kind."}, {"role": "user", "content": " hi \n"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "why"},
        {"role": "user", "content": "ç 🚀"},
    ],
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_like_transformers(template: str, conversation: str) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **VARIABLES)
    messages = CONVERSATIONS[conversation]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for given in (None, tools):
        expected = theirs.apply_chat_template(
            messages, tools=given, chat_template=TEMPLATES[template], tokenize=False, add_generation_prompt=True
        )
        assert ChatTemplate(TEMPLATES[template], VARIABLES).render(messages, tools=given) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('Only user and assistant roles are supported!') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__init__.__globals__ }}",
    ],
)
def test_a_template_that_fails_is_a_row_error(source: str) -> None:
    with pytest.raises(RowError) as caught:
        ChatTemplate(source, VARIABLES).render(CONVERSATIONS["one"])
    assert caught.value.code == RowErrorCode.TEMPLATE_ERROR


def test_the_row_error_holds_the_templates_own_words() -> None:
    with pytest.raises(RowError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(CONVERSATIONS["one"])


def test_the_date_can_be_fixed() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, now=datetime(2024, 2, 29))
    assert template.render([]) == "2024-02-29"


def test_messages_are_not_changed() -> None:
    messages = [{"role": "assistant", "content": "a", "thinking": "b"}]
    ChatTemplate("{{ messages[0].reasoning_content }}", {}).render(messages)
    assert messages == [{"role": "assistant", "content": "a", "thinking": "b"}]


def test_an_invalid_template_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="chat template is not valid"):
        ChatTemplate("{% for %}", {})


def test_where_a_template_is_found(tmp_path: Path) -> None:
    def found(config: dict[str, Any]) -> str | None:
        template = load_chat_template(tmp_path, config, {})
        return None if template is None else template.source

    assert found({}) is None
    assert found({"chat_template": "c"}) == "c"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert found({"chat_template": named}) == "d"
    assert found({"chat_template": named[:1]}) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert found({"chat_template": "c"}) == "j"
    (tmp_path / "chat_template.jinja").write_text("f")
    assert found({"chat_template": "c"}) == "f"
