"""Rows to requests, and finished sequences back to completions."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.fake_model import make_tokenizer

from nightmill.errors import EngineError, ValidationError
from nightmill.records import Completion, JobSpec, ModelSpec
from nightmill.rows import InputRow
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.request import Finished, FinishReason, TokenLogprobs
from nightmill_worker.feed.completions import completion_of
from nightmill_worker.feed.requests import RequestMaker, RowRequest
from nightmill_worker.feed.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer(tmp_path_factory.mktemp("chat"), chat=True))


def maker(tokenizer: Tokenizer, *, max_model_len: int = 20, vocab_size: int | None = None, **spec: Any) -> RequestMaker:
    job = JobSpec(inputs=("in",), output="out", model=ModelSpec(model="m"), **spec)
    return RequestMaker(tokenizer, job, job_id="job", tier=Tier.LOW, max_model_len=max_model_len, vocab_size=vocab_size)


def row(index: int = 0, **fields: Any) -> InputRow:
    fields.setdefault("sampling", SamplingParams(max_tokens=4))
    return InputRow(row_index=index, custom_id=f"id-{index}", seed=9, **fields)


def made(result: RowRequest | Completion) -> RowRequest:
    assert isinstance(result, RowRequest), result
    return result


def refused(result: RowRequest | Completion) -> str | None:
    assert isinstance(result, Completion), result
    assert result.error_message
    return result.error_code


def test_plain_prompts_keep_their_order_and_carry_the_job(plain: Tokenizer) -> None:
    results = [made(r).request for r in maker(plain).make([row(i, prompt=f"{i + 2} 3") for i in range(5)])]
    assert [r.prompt for r in results] == [(i + 2, 3) for i in range(5)]
    assert {(r.job_id, r.tier, r.seed) for r in results} == {("job", Tier.LOW, 9)}
    assert len({r.request_id for r in results}) == 5


def test_a_stop_token_that_the_model_does_not_have_is_a_row_error(plain: Tokenizer) -> None:
    samplings = [SamplingParams(max_tokens=4, stop_token_ids=(3, last)) for last in (99, 100)]
    rows = [row(i, prompt="2 3", sampling=sampling) for i, sampling in enumerate(samplings)]
    good, bad = maker(plain, vocab_size=100).make(rows)
    assert made(good).request.sampling.stop_token_ids == (3, 99)
    assert refused(bad) == "invalid_sampling_params"
    assert isinstance(bad, Completion)
    assert "stop_token_ids holds 100" in str(bad.error_message)


def test_makers_that_share_ids_never_repeat_one(plain: Tokenizer) -> None:
    ids = iter(range(1000))
    job = JobSpec(inputs=("in",), output="out", model=ModelSpec(model="m"))
    makers = [
        RequestMaker(plain, job, job_id=str(i), tier=Tier.LOW, max_model_len=20, request_ids=ids) for i in range(2)
    ]
    seen = [made(r).request.request_id for _ in range(3) for m in makers for r in m.make([row(prompt="2")])]
    assert len(set(seen)) == len(seen)


def test_a_bad_row_between_good_ones_keeps_its_place(plain: Tokenizer) -> None:
    long = " ".join(["5"] * 20)
    results = maker(plain).make([row(0, prompt="2"), row(1, prompt=long), row(2, prompt="4")])
    assert made(results[0]).row.row_index == 0
    assert refused(results[1]) == "context_length_exceeded"
    assert made(results[2]).row.row_index == 2


@pytest.mark.parametrize(("length", "fits"), [(18, True), (19, True), (20, False), (21, False)])
def test_the_context_needs_room_for_one_token(plain: Tokenizer, length: int, fits: bool) -> None:
    (result,) = maker(plain).make([row(prompt=" ".join(["5"] * length))])
    if fits:
        assert made(result).request.sampling.max_tokens == min(4, 20 - length)
    else:
        assert refused(result) == "context_length_exceeded"


def test_strict_refuses_what_would_be_clamped(plain: Tokenizer) -> None:
    rows = [row(prompt=" ".join(["5"] * 17)), row(prompt=" ".join(["5"] * 16))]
    results = maker(plain, strict=True).make(rows)
    assert refused(results[0]) == "context_length_exceeded"
    assert made(results[1]).request.sampling.max_tokens == 4


def test_min_tokens_is_clamped_with_max_tokens(plain: Tokenizer) -> None:
    sampling = SamplingParams(max_tokens=10, min_tokens=10)
    (result,) = maker(plain).make([row(prompt=" ".join(["5"] * 17), sampling=sampling)])
    assert made(result).request.sampling.min_tokens == 3


def test_a_prompt_without_tokens_is_empty(plain: Tokenizer) -> None:
    (result,) = maker(plain).make([row(prompt=" \N{NO-BREAK SPACE} ")])
    assert refused(result) == "empty_prompt"


def test_a_row_the_tokenizer_cannot_take_fails_alone(plain: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As Rust's panics arrive."""

    encode_batch = plain.encode_batch

    def panic(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        if "13" in texts:
            raise PanicException("index out of bounds")
        return encode_batch(texts, add_special_tokens)

    monkeypatch.setattr(plain, "encode_batch", panic)
    results = maker(plain).make([row(0, prompt="2"), row(1, prompt="13"), row(2, prompt="4")])
    assert made(results[0]).request.prompt == (2,)
    assert refused(results[1]) == "engine_error"
    assert made(results[2]).request.prompt == (4,)


def test_the_system_prompt_comes_first_unless_the_row_has_its_own(chat: Tokenizer, plain: Tokenizer) -> None:
    messages = [{"role": "system", "content": "8"}, {"role": "user", "content": "9"}]
    rows = [row(prompt="2"), row(messages=messages), row(messages=messages[1:])]
    results = [made(r).request.prompt for r in maker(chat, system_prompt="7").make(rows)]
    assert results == [(7, 2), (8, 9), (7, 9)]
    assert messages[0]["content"] == "8"
    assert len(messages) == 2
    (result,) = maker(plain, system_prompt="7").make([row(prompt="2")])
    assert made(result).request.prompt == (7, 2)


def test_messages_without_a_template_are_a_row_error(plain: Tokenizer, chat: Tokenizer) -> None:
    messages = [{"role": "user", "content": "9"}]
    assert refused(maker(plain).make([row(messages=messages)])[0]) == "invalid_messages"
    assert refused(maker(chat, chat=False).make([row(messages=messages)])[0]) == "invalid_messages"


def test_chat_without_a_template_is_refused_at_once(plain: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="no chat template"):
        maker(plain, chat=True)


def test_ignore_eos_leaves_no_eos(tmp_path: Path) -> None:
    directory = make_tokenizer(tmp_path)
    (directory / "config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    tokenizer = Tokenizer.load(directory)
    rows = [row(prompt="2"), row(prompt="2", sampling=SamplingParams(ignore_eos=True, max_tokens=2))]
    assert [made(r).request.eos_token_ids for r in maker(tokenizer).make(rows)] == [(5, 6), ()]


def finished(*token_ids: int, reason: FinishReason = FinishReason.STOP, **fields: Any) -> Finished:
    fields.setdefault("stop_match", None)
    return Finished(
        request_id=0, token_ids=token_ids, finish_reason=reason, num_prompt_tokens=1, num_cached_tokens=0, **fields
    )


def answer(tokenizer: Tokenizer, ended: Finished) -> Completion:
    (result,) = maker(tokenizer).make([row(prompt="2")])
    return completion_of(made(result), ended, tokenizer, attempt=3)


def test_the_text_is_without_the_token_that_ended_it(plain: Tokenizer) -> None:
    completion = answer(plain, finished(11, 12, 5, stop_match=5))
    assert (completion.text, completion.finish_reason, completion.completion_tokens) == ("11 12", "stop", 3)
    assert (completion.attempts, completion.max_tokens_effective, completion.seed) == (3, 4, 9)


def test_the_text_ends_before_the_stop_string(plain: Tokenizer) -> None:
    assert answer(plain, finished(11, 12, 13, stop_match="2 1")).text == "11 1"
    # One before min_tokens did not count: only what the last token completed does.
    assert answer(plain, finished(33, 44, 33, stop_match="33")).text == "33 44 "


def test_length_keeps_everything(plain: Tokenizer) -> None:
    completion = answer(plain, finished(11, 12, reason=FinishReason.LENGTH))
    assert (completion.text, completion.finish_reason, completion.error_code) == ("11 12", "length", None)


def test_the_engines_error_is_the_rows_error(plain: Tokenizer) -> None:
    completion = answer(plain, finished(reason=FinishReason.ERROR, error="non-finite logits"))
    assert (completion.error_code, completion.error_message) == ("engine_error", "non-finite logits")
    assert completion.text is None


def test_an_aborted_sequence_is_no_answer(plain: Tokenizer) -> None:
    with pytest.raises(EngineError):
        answer(plain, finished(reason=FinishReason.ABORT))


def test_logprobs_have_openais_form(plain: Tokenizer) -> None:
    position = TokenLogprobs(token_id=11, logprob=-0.5, top=((11, -0.5), (12, -1.5)))
    completion = answer(plain, finished(11, reason=FinishReason.LENGTH, logprobs=(position,)))
    assert completion.logprobs is not None
    (content,) = json.loads(completion.logprobs)["content"]
    assert (content["token"], content["logprob"], content["bytes"]) == ("11", -0.5, [49, 49])
    assert [top["token"] for top in content["top_logprobs"]] == ["11", "12"]
