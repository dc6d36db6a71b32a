import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from nightmill_worker.feed.prefix import PrefixEncoder
from nightmill_worker.feed.template import ChatTemplate
from nightmill_worker.feed.tokenizer import BYTE_OF_CHARACTER, Tokenizer

_ALPHABET = "abc 12\n\u00e9"


def _tokenizer(*added: AddedToken, metaspace: str | None = None, template: str | None = None) -> Tokenizer:
    """Merges of two letters over bytes, so that where a text is cut can be seen in the ids."""
    vocab = {character: i for i, character in enumerate([*BYTE_OF_CHARACTER, "▁"])}
    merges = [(left, right) for left in "abcĠ▁" for right in "abcĠ▁"]
    vocab |= {left + right: len(vocab) + i for i, (left, right) in enumerate(merges)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    if metaspace is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace)
    for token in added:
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    source = template if template is not None else " ".join(token.content for token in added)
    return Tokenizer(backend, special_tokens={}, eos_token_ids=(), template=ChatTemplate("{#" + source + "#}", {}))


def _special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, **({"normalized": False} | flags))


def _same(tokenizer: Tokenizer, texts: list[str]) -> PrefixEncoder:
    encoder = PrefixEncoder(tokenizer)
    encoder._verified = True  # the check at the first batch must not be what makes this pass
    expected = tokenizer.encode_batch(texts, add_special_tokens=False)
    assert encoder.encode_batch(texts) == expected
    assert encoder.encode_batch(texts) == expected  # from memory
    return encoder


def _counting(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the tokenizer is asked to encode from here on."""
    asked: list[str] = []
    encode_batch = tokenizer.encode_batch

    def count(texts: Any, add_special_tokens: bool = True) -> list[list[int]]:
        asked.extend(texts)
        return encode_batch(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", count)
    return asked


_PIECES = st.lists(
    st.sampled_from(["<a>", "<b>", "<c>", "<a", "b>", "<t>", "c", " ", "  ", "ab", "cab", "12", "é", "\n"])
)
_TEXTS = st.lists(_PIECES.map("".join), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(_TEXTS)
def test_ids_are_those_of_the_whole(texts: list[str]) -> None:
    _same(_tokenizer(_special("<a>"), _special("<b>"), AddedToken("<t>", special=False)), texts)


_DIFFICULT = {
    "takes the space behind it": [_special("<a>", rstrip=True)],
    "takes the space before it": [_special("<a>", lstrip=True)],
    "a word of its own only": [_special("<c>", single_word=True), _special("<a>")],
    "begins another": [_special("<a>"), _special("<a><b>")],
    "begins another that is no special token": [_special("<a>"), AddedToken("<a> a", special=False, normalized=False)],
    "another ends where it begins": [_special("12a"), AddedToken("c1", special=False, normalized=False)],
    "another ends with it": [_special("<b>"), _special("12<b>")],
    "matched after normalising": [_special("<a>", normalized=True), _special("<b>")],
}


@pytest.mark.parametrize("kind", _DIFFICULT)
def test_ids_are_those_of_the_whole_with_difficult_tokens(kind: str) -> None:
    @settings(max_examples=200, deadline=None)
    @given(_TEXTS)
    @example(["c12ab"])
    def check(texts: list[str]) -> None:
        _same(tokenizer, texts)

    tokenizer = _tokenizer(*_DIFFICULT[kind], _special("<t>"))
    check()


@settings(max_examples=100, deadline=None)
@given(_TEXTS, st.sampled_from(["first", "always", "never"]))
def test_ids_are_those_of_the_whole_with_space_marks(texts: list[str], scheme: str) -> None:
    _same(_tokenizer(_special("<a>"), _special("<b>"), metaspace=scheme), texts)


def test_what_is_shared_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _tokenizer(_special("<a>"), _special("<b>"))
    encoder = PrefixEncoder(tokenizer)
    encoder.encode_batch(["<a>check<b>"])
    asked = _counting(tokenizer, monkeypatch)
    shared = "<a>system" + " abc" * 100 + "<b>\n<a>"
    encoder.encode_batch([f"{shared}one<b>", f"{shared}two<b>"])
    assert sorted(asked) == sorted({"<a>", "system" + " abc" * 100 + "<b>", "\n<a>", "one<b>", "two<b>"})
    asked.clear()
    encoder.encode_batch([f"{shared}three<b>"])
    assert asked == ["three<b>"]


def test_only_tokens_of_the_template_are_cut_at(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _tokenizer(_special("<a>"), _special("<b>"), template="<a>")
    asked = _counting(tokenizer, monkeypatch)
    encoder = PrefixEncoder(tokenizer)
    encoder._verified = True
    encoder.encode_batch(["x<a>y<b>z"])
    assert asked == ["x<a>", "y<b>z"]


def test_a_tokenizer_that_breaks_the_rules_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = _tokenizer(_special("<a>"))
    encoder = PrefixEncoder(tokenizer)

    encoder._cut = re.compile("a")  # not a place to cut at
    texts = ["abcabc", "abcabcab"]
    assert encoder.encode_batch(texts) == tokenizer.encode_batch(texts, add_special_tokens=False)
    assert "encoding them whole" in caplog.text
    assert encoder._cut is None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from nightmill_worker.feed import prefix

    monkeypatch.setattr(prefix, "_MAX_SEGMENTS", 3)
    monkeypatch.setattr(prefix, "_MAX_CHARACTERS", 40)
    encoder = PrefixEncoder(_tokenizer(_special("<a>")))
    for number in range(20):
        encoder.encode_batch([f"{number}<a>"] * 2)
        assert len(encoder._memory) <= 3
        assert encoder._num_characters == sum(map(len, encoder._memory)) <= 40
    assert list(encoder._memory) == ["17<a>", "18<a>", "19<a>"]
    encoder.encode_batch(["x" * 41 + "<a>"] * 2)
    assert list(encoder._memory) == ["17<a>", "18<a>", "19<a>"]


@pytest.mark.demo_model
def test_the_demo_models_chats(demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(demo_model_dir)
    texts = [
        tokenizer.render_chat([{"role": "system", "content": "Answer with 1 word."}, {"role": "user", "content": word}])
        for word in ("12345 apples", "  leading", "trailing  ", "<|im_end|>", "<|im_start|", "été\n\n", "")
    ]
    encoder = _same(tokenizer, texts)
    assert "system\nAnswer with 1 word.<|im_end|>" in encoder._memory
