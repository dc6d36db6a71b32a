"""GGUF tokenizers against ids that llama.cpp gave for the same vocabulary (see data/llamacpp_ids.json)."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from nightmill.errors import ModelError
from nightmill_worker.model.gguf_tokenizer import (
    GgufMetadata,
    build_byte_level_tokenizer,
    mend_sentencepiece,
    set_template,
    tokenizer_config,
)
from nightmill_worker.model.pre_tokenizers import PRE_TOKENIZERS

GOLDEN = json.loads((Path(__file__).parent / "data" / "llamacpp_ids.json").read_text())


@pytest.fixture(scope="session")
def vocabulary(demo_model_dir: Path) -> dict[str, Any]:
    """The demo model's vocabulary as a GGUF file has it."""
    saved = json.loads((demo_model_dir / "tokenizer.json").read_text())
    tokens = sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].__getitem__)
    special = {token["content"] for token in saved["added_tokens"]}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in saved["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _metadata(**tokenizer: Any) -> GgufMetadata:
    """A byte-level file with five tokens."""
    fields: dict[str, Any] = {"model": "gpt2", "tokens": ["a", "b", "<bos>", "<eos>", "<end_of_turn>"]}
    fields |= {"token_type": [1, 1, 3, 3, 3], "merges": [], "bos_token_id": 2, "eos_token_id": 3, "pre": "gpt-2"}
    fields |= tokenizer
    return GgufMetadata(
        name="five.gguf",
        fields={f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None},
    )


@pytest.mark.demo_model
@pytest.mark.parametrize("name", GOLDEN["all"]["ids"])
def test_every_kind_of_pre_tokenizer_gives_llamacpps_ids(name: str, vocabulary: dict[str, Any]) -> None:
    metadata = GgufMetadata(name=name, fields=vocabulary | {"tokenizer.ggml.pre": name})
    tokenizer = build_byte_level_tokenizer(metadata)
    texts = GOLDEN["all"]["texts"]
    found = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    assert dict(zip(texts, found, strict=True)) == dict(zip(texts, GOLDEN["all"]["ids"][name], strict=True))


@pytest.mark.demo_model
def test_the_demo_model_gives_llamacpps_ids(demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    texts = GOLDEN["smollm"]["texts"]
    found = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert dict(zip(texts, found, strict=True)) == dict(zip(texts, GOLDEN["smollm"]["ids"], strict=True))


@pytest.mark.demo_model
def test_digits_are_split(demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    assert tokenizer.encode("12345").tokens == ["1", "2", "3", "4", "5"]


def test_the_kinds_that_were_compared_are_all_there_is() -> None:
    compared = {PRE_TOKENIZERS[name] for name in GOLDEN["all"]["ids"]}
    assert {kind for kind in PRE_TOKENIZERS.values() if kind not in compared} == set()


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_expression_compiles(name: str) -> None:
    pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str("In 2024: it's 3.14 €\n\n x")
    assert "".join(piece for piece, _ in pieces) == "InĠ2024:Ġit'sĠ3.14Ġâ" + "Ĥ¬ĊĊĠx"


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'brand-new'.*\n.*tokenizer\.json"):
        build_byte_level_tokenizer(_metadata(pre="brand-new"))


def test_a_file_without_the_key_is_an_old_one() -> None:
    assert _metadata(pre=None).pre_tokenizer == PRE_TOKENIZERS["default"]


@pytest.mark.parametrize(
    ("fields", "adds"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "llama-bpe", "bos_token_id": None}, False),
        ({"model": "llama", "pre": "default"}, True),
        ({"model": "llama", "add_bos_token": False}, False),
    ],
)
def test_bos_in_front_of_plain_text(fields: dict[str, Any], adds: bool) -> None:
    metadata = _metadata(**fields)
    assert metadata.adds_bos is adds
    assert tokenizer_config(metadata)["add_bos_token"] is adds
    tokenizer = build_byte_level_tokenizer(_metadata())
    set_template(tokenizer, metadata)
    assert tokenizer.encode("ab").ids == ([2, 0, 1] if adds else [0, 1])


def test_every_token_that_ends_an_answer_is_named() -> None:
    template = "{{ '<start_of_turn>' + m.content + '<end_of_turn>' }}"
    assert _metadata().end_token_ids() == (3,)
    assert _metadata(eot_token_id=4).end_token_ids() == (3, 4)
    with_template = _metadata()
    with_template.fields["tokenizer.chat_template"] = template
    assert with_template.end_token_ids() == (3, 4)
    plain_word = _metadata(token_type=[1, 1, 3, 3, 1])
    plain_word.fields["tokenizer.chat_template"] = template
    assert plain_word.end_token_ids() == (3,)
    assert _metadata(eos_token_id=99).end_token_ids() == ()


def test_words_of_the_vocabulary_are_taken_whole_where_merges_are_ignored() -> None:
    fields = {"tokens": ["a", "b", "ab", "<eos>"], "token_type": [1, 1, 1, 3], "bos_token_id": None}
    assert build_byte_level_tokenizer(_metadata(pre="llama-bpe", **fields)).encode("ab").ids == [2]
    assert build_byte_level_tokenizer(_metadata(pre="gpt-2", **fields)).encode("ab").ids == [0, 1]


def test_control_tokens_outside_the_byte_alphabet_stay_whole() -> None:
    begin = "<｜begin▁of▁sentence｜>"
    tokenizer = build_byte_level_tokenizer(_metadata(tokens=["a", "b", begin, "<eos>", "<end_of_turn>"]))
    assert tokenizer.encode(f"{begin}ab").ids == [2, 0, 1]
    assert tokenizer.decode([2, 0, 1], skip_special_tokens=False) == f"{begin}ab"


def test_user_defined_tokens_stay_in_decoded_text() -> None:
    tokenizer = build_byte_level_tokenizer(_metadata(token_type=[1, 1, 3, 3, 4]))
    ids = tokenizer.encode("a<end_of_turn><eos>").ids
    assert ids == [0, 4, 3]
    assert tokenizer.decode(ids) == "a<end_of_turn>"


def _sentencepiece(architecture: str, **fields: Any) -> Any:
    from tokenizers import AddedToken, models

    vocab = {"▁": 0, "a": 1, "▁▁": 2, "▁a": 3, "<s>": 4, "<|user|>": 5, "\n": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "▁"), ("▁", "a")], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "<|user|>")])
    metadata = _metadata(model="llama", **fields)
    metadata.fields["general.architecture"] = architecture
    return mend_sentencepiece(tokenizer, metadata)


def test_sentencepiece_puts_a_space_in_front_of_every_piece() -> None:
    tokenizer = _sentencepiece("llama")
    assert tokenizer.encode("a").ids == [3]
    assert tokenizer.encode(" a").ids == [2, 1]
    assert tokenizer.encode("<s>a").ids == [4, 3]
    assert tokenizer.decode([2, 1]) == " a"


def test_sentencepiece_without_the_space() -> None:
    tokenizer = _sentencepiece("gemma", add_space_prefix=False)
    assert tokenizer.encode("a").ids == [1]
    assert tokenizer.decode([3]) == " a"


def test_phi3s_tokens_take_the_space_behind_them() -> None:
    assert _sentencepiece("phi3").encode("<|user|>\na").ids == [5, 3]
    assert _sentencepiece("phi3").encode("<s> a").ids == [4, 2, 1]
