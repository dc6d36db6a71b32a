from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from nightmill_worker.engine.request import Finished, FinishReason
from nightmill_worker.feed.detokenize import completion_text
from nightmill_worker.feed.tokenizer import BYTE_OF_CHARACTER, Tokenizer

_EOS, _WORD = 256, 257


def _bytes_tokenizer() -> Tokenizer:
    backend = Backend(models.BPE(vocab={character: i for i, character in enumerate(BYTE_OF_CHARACTER)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", normalized=False)])
    backend.add_tokens([AddedToken("##", normalized=False)])
    return Tokenizer(backend, special_tokens={}, eos_token_ids=(_EOS,), template=None)


TOKENIZER = _bytes_tokenizer()


def _finished(token_ids: list[int], stop_match: str | int | None = None) -> Finished:
    return Finished(
        request_id=1,
        token_ids=tuple(token_ids),
        finish_reason=FinishReason.LENGTH if stop_match is None else FinishReason.STOP,
        stop_match=stop_match,
        num_prompt_tokens=1,
        num_cached_tokens=0,
    )


def _text(text: str, stop_match: str | int | None = None) -> str:
    return completion_text(TOKENIZER, _finished(TOKENIZER.encode(text), stop_match))


def test_eos_and_stop_tokens_are_not_text() -> None:
    assert _text("answer</s>", _EOS) == "answer"
    assert _text("answer##", _WORD) == "answer"
    assert _text("one ## two##", _WORD) == "one ## two"


def test_a_stop_string_is_cut_where_it_completed() -> None:
    assert _text("answer\n\nQ", "\n\nQ") == "answer"
    assert _text("END", "END") == ""
    # With min_tokens the first one did not count.
    assert _text("a END b END", "END") == "a END b "
    assert _text("aaa", "aa") == "a"


def test_a_stop_string_inside_a_character_of_several_tokens() -> None:
    assert _text("né🚀", "🚀") == "né"
    assert _text("né🚀é", "🚀é") == "né"


def test_half_a_character_is_left_out() -> None:
    for text in ("né", "n€", "n🚀"):
        ids = TOKENIZER.encode(text)
        for cut in range(1, len(ids) - 1):
            assert completion_text(TOKENIZER, _finished(ids[:-cut])) == "n"
    assert _text("n\N{REPLACEMENT CHARACTER}") == "n\N{REPLACEMENT CHARACTER}"
    genuine = TOKENIZER.encode("\N{REPLACEMENT CHARACTER}🚀")[:-1]
    assert completion_text(TOKENIZER, _finished(genuine)) == "\N{REPLACEMENT CHARACTER}"


def test_nothing_generated() -> None:
    assert completion_text(TOKENIZER, _finished([])) == ""
    assert completion_text(TOKENIZER, _finished([_EOS], _EOS)) == ""


@given(st.text(alphabet="abE é🚀", max_size=12), st.text(alphabet="abE é🚀", min_size=1, max_size=3))
def test_the_text_never_holds_the_stop(text: str, stop: str) -> None:
    """Push tokens until the stop is complete, as the engine does."""
    ids = TOKENIZER.encode(text + stop)
    for length in range(1, len(ids) + 1):
        if stop in TOKENIZER.decode(ids[:length]):
            break
    found = completion_text(TOKENIZER, _finished(ids[:length], stop))
    assert stop not in found
    assert (text + stop).startswith(found + stop)


@pytest.mark.demo_model
def test_the_demo_model_round_trips(demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(demo_model_dir)
    text = "The price is 12,345.67 € — naïve? 🚀 你好"
    ids = [*tokenizer.encode(text), 2]
    assert completion_text(tokenizer, _finished(ids, 2)) == text
    for cut in range(len(ids)):
        assert text.startswith(completion_text(tokenizer, _finished(ids[:cut])))
