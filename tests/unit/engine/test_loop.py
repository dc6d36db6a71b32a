"""The loop's contract: one answer per request, from every state; stops; refusals."""

import gc
import pickle
import subprocess
import sys

import pytest

from nightmill.errors import EngineError
from nightmill.states import Tier
from nightmill_worker.engine.fake import FakeRunnerConfig, expected_tokens
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.prefix_index import Node
from nightmill_worker.engine.sequence import Sequence


def letters(token_ids):
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


def test_nothing_to_do(make_drill):
    drill = make_drill()
    assert not drill.loop.has_work
    assert drill.step() == []
    assert drill.loop.stats().steps == 0


def test_mixed_parameter_batch_equals_solo_runs(make_drill, make_request):
    drill = make_drill()
    samplings = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 3},
        {"presence_penalty": 1.0},
        {"frequency_penalty": -0.5, "temperature": 1.0},
        {"repetition_penalty": 1.1, "min_tokens": 3, "stop_token_ids": (1, 2, 3)},
        {"stop": ("a", "bc")},
    ]
    drill.add(*(make_request(i, 20, seed=2**64 - 1 - i, **s) for i, s in enumerate(samplings)))
    drill.drain()  # compares each with the oracle, which knows nothing of the batch


def test_eos_ends_a_sequence_and_is_its_last_token(make_drill, make_request):
    drill = make_drill()
    tokens, _, _ = expected_tokens(make_request(1, 10), 1000)
    drill.add(make_request(1, 10, eos=(5000, tokens[3])))
    answer = drill.drain()[1]
    assert (answer.token_ids, answer.finish_reason, answer.stop_match) == (tokens[:4], "stop", tokens[3])


def test_stop_token_in_the_same_step_as_max_tokens_is_a_stop(make_drill, make_request):
    drill = make_drill()
    tokens, _, _ = expected_tokens(make_request(1, 10), 1000)
    drill.add(make_request(1, 10, stop_token_ids=(tokens[-1],)))
    answer = drill.drain()[1]
    assert (answer.token_ids, answer.finish_reason, answer.stop_match) == (tokens, "stop", tokens[-1])


def test_stop_string_in_the_same_step_as_max_tokens_is_a_stop(make_drill, make_request):
    drill = make_drill()
    text = letters(expected_tokens(make_request(1, 10), 1000)[0])
    drill.add(make_request(1, 10, stop=(text[-3:],)))
    answer = drill.drain()[1]
    assert (answer.finish_reason, answer.stop_match) == ("stop", text[-3:])


def test_stop_token_wins_over_a_stop_string_in_the_same_step(make_drill, make_request):
    drill = make_drill()
    tokens, _, _ = expected_tokens(make_request(1, 10), 1000)
    drill.add(make_request(1, 10, stop=(letters(tokens[:5])[-3:],), stop_token_ids=(tokens[4],)))
    assert drill.drain()[1].stop_match == tokens[4]


def test_ignored_eos_does_not_end_a_sequence(make_drill, make_request):
    drill = make_drill(vocab_size=4)
    drill.add(make_request(1, (1, 2, 3), eos=(), ignore_eos=True, max_tokens=40))
    assert drill.drain()[1].finish_reason == "length"


def test_many_stop_tokens_widen_the_table(make_drill, make_request):
    drill = make_drill()
    drill.add(make_request(1, 10, max_tokens=30))
    drill.step()
    tokens, _, _ = expected_tokens(make_request(2, 10), 1000)
    others = sorted({*range(1000)} - {*tokens})[:40]
    drill.add(make_request(2, 10, stop_token_ids=(*others, tokens[5])))
    answers = drill.drain()
    assert answers[2].stop_match == tokens[5]
    assert answers[1].finish_reason == "length"


def test_stop_tokens_are_banned_until_min_tokens(make_drill, make_request):
    drill = make_drill(vocab_size=8)
    drill.add(make_request(1, (1, 2, 3), min_tokens=10, max_tokens=40, eos=(0, 1, 2, 3, 4, 5)))
    answer = drill.drain()[1]
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) > 10
    assert set(answer.token_ids[:10]) <= {6, 7}


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding", "preempted", "ended"])
def test_cancel_from_every_state(make_drill, make_request, state):
    drill = make_drill(max_prefill_chunk=8)
    drill.add(make_request(1, 20, max_tokens=12), make_request(2, 20, max_tokens=30))
    for _ in range({"queued": 0, "prefilling": 1, "decoding": 5, "preempted": 5, "ended": 20}[state]):
        drill.step()
    if state == "preempted":
        assert drill.preempt(1)
    drill.cancel(1, 1, 77)
    answers = drill.drain()
    assert answers[1].finish_reason == ("length" if state == "ended" else "abort")
    assert answers[2].finish_reason == "length"
    if state in ("decoding", "preempted"):
        assert len(answers[1].token_ids) == 3


def test_cancelled_request_answers_once_and_its_id_can_be_used_again(make_drill, make_request):
    drill = make_drill()
    drill.loop.add(make_request(1, 20))
    drill.loop.cancel([1])
    drill.loop.add(make_request(1, 20))
    reasons = []
    while drill.loop.has_work:
        reasons += [answer.finish_reason for answer in drill.loop.step()]
    assert reasons == ["abort", "length"]


def test_cancel_job_ends_its_requests_only(make_drill, make_request):
    drill = make_drill(max_num_seqs=2)
    drill.add(*(make_request(i, 20, job_id="ab"[i % 2]) for i in range(6)))
    drill.step()
    drill.loop.cancel_job("a")
    answers = drill.drain()
    assert [answers[i].finish_reason for i in range(6)] == ["abort", "length"] * 3


def test_live_id_cannot_be_added_twice(make_drill, make_request):
    drill = make_drill()
    drill.loop.add(make_request(1, 20))
    with pytest.raises(EngineError, match="request 1 is already in the engine"):
        drill.loop.add(make_request(1, 20))


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ((), {}, "the prompt has no tokens"),
        ((1,) * 500, {"max_tokens": 13}, "together they may be at most 512"),
        ((1, 1000), {}, "outside the vocabulary of 1000"),
        ((-1,), {}, "outside the vocabulary of 1000"),
        ((1, 2), {"stop_token_ids": (5, 1000), "min_tokens": 2}, "stop_token_ids holds 1000, outside the vocabulary"),
    ],
)
def test_request_that_can_never_run_is_a_row_error(make_drill, make_request, prompt, sampling, message):
    drill = make_drill()
    drill.add(make_request(1, prompt, **sampling), make_request(2, 5))
    answers = drill.drain()
    assert answers[1].finish_reason == "error"
    assert message in answers[1].error
    assert answers[2].finish_reason == "length"


def test_an_eos_that_the_model_cannot_draw_is_not_banned(make_drill, make_request):
    """As a place in the logits of all rows it would be another row's token."""
    drill = make_drill()
    drill.add(make_request(1, 5, eos=(7, 1000, 1004), min_tokens=3), make_request(2, 5))
    answers = drill.drain()  # the fake model audits each plan
    assert answers[1].error is None
    assert len(answers[1].token_ids) >= 3
    assert answers[2].finish_reason == "length"


def test_stop_strings_without_a_detokenizer_are_a_row_error(make_request):
    loop = EngineLoop(FakeRunnerConfig().build(), LoopOptions())
    loop.add(make_request(1, 5, stop=("x",)))
    assert "need a tokenizer" in loop.step()[0].error


def test_context_can_be_filled_to_its_last_token(make_drill, make_request):
    drill = make_drill(max_model_len=48)
    drill.add(make_request(1, 40, max_tokens=8), make_request(2, 47, max_tokens=1))
    answers = drill.drain()
    assert [len(answers[i].token_ids) for i in (1, 2)] == [8, 1]


def test_crash_of_the_runner_is_raised(make_request):
    loop = EngineLoop(FakeRunnerConfig(crash_token=7).build(), LoopOptions())
    loop.add(make_request(1, (1, 7)))
    with pytest.raises(EngineError, match="crash token 7"):
        loop.step()


def test_logprobs_are_one_per_token(make_drill, make_request):
    drill = make_drill()
    drill.add(make_request(1, 5, logprobs=3), make_request(2, 5, logprobs=0), make_request(3, 5))
    answers = drill.drain()
    assert [entry.token_id for entry in answers[1].logprobs] == list(answers[1].token_ids)
    assert {len(entry.top) for entry in answers[1].logprobs} == {3}
    assert {len(entry.top) for entry in answers[2].logprobs} == {0}
    assert answers[3].logprobs is None


def test_stats_add_up(make_drill, make_request):
    drill = make_drill()
    drill.add(*(make_request(i, 20 + i, max_tokens=1 + i, tier=list(Tier)[i % 3]) for i in range(9)))
    drill.step()
    drill.cancel(8)
    drill.drain()
    stats = drill.loop.stats()
    assert (stats.finished, stats.aborted, stats.errors, stats.running, stats.waiting) == (8, 1, 0, 0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert stats.generated_tokens >= sum(1 + i for i in range(8))
    assert stats.plan_s > 0
    assert stats.commit_s > 0


def test_close_closes_the_runner():
    runner = FakeRunnerConfig().build()
    EngineLoop(runner, LoopOptions()).close()
    assert runner.is_closed


def test_fake_runner_crosses_a_process_border():
    config = FakeRunnerConfig(num_pages=9)
    assert pickle.loads(pickle.dumps(config)).build().pool.num_pages == 9


def test_oracle_does_not_depend_on_anything_but_the_request(make_request):
    request = make_request(1, 10, temperature=1.0)
    assert expected_tokens(request, 1000) == expected_tokens(request, 1000)
    other = make_request(2, request.prompt, temperature=1.0)
    assert expected_tokens(request, 1000)[0] != expected_tokens(other, 1000)[0]


def test_engine_makes_no_cyclic_garbage(make_drill, make_request):
    """So that the engine's process can run without the cyclic collector, whose passes take 100 ms at 100k waiting."""
    gc.collect()
    gc.disable()
    try:
        drill = make_drill(num_pages=40, max_prefill_chunk=16)
        prefix = tuple(range(40))
        drill.add(*(make_request(i, (*prefix[: i % 40], i)) for i in range(60)))
        for i in range(12):
            drill.step()
            drill.preempt(i)
            drill.cancel(50 + i)
        drill.drain()
        drill.loop.index.evict(drill.loop.pool.num_cached)
        assert not [thing for thing in gc.get_objects() if isinstance(thing, Sequence)]
        # The list of what can be evicted may name nodes that are gone: they are not garbage yet, and make no cycle.
        before = sum(isinstance(thing, Node) for thing in gc.get_objects())
        gc.collect()
        assert sum(isinstance(thing, Node) for thing in gc.get_objects()) == before < 5
    finally:
        gc.enable()


def test_engine_loads_no_torch():
    code = "import sys; import nightmill_worker.engine.drill; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
