"""One engine process, three jobs in three tiers each: nothing of one is lost, mixed up or charged to another."""

from collections import Counter

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.fake import FakeRunnerConfig, expected_tokens
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Finished, FinishReason, Request
from nightmill_worker.service import EngineService

FAIL = 7
VOCAB = 1000
JOBS = ("keeps", "fails", "stops")
ROWS = 40  # of each job and tier


def make(request_id: int) -> Request:
    job, tier = JOBS[request_id % 3], list(Tier)[request_id // 3 % 3]
    fails = job == "fails" and request_id % 4 == 0
    return Request(
        request_id=request_id,
        job_id=job,
        tier=tier,
        prompt=(*range(100, 140), 200 + request_id, *((FAIL,) if fails else ()), 300 + request_id),
        sampling=SamplingParams(max_tokens=400 if job == "stops" else 20),
        seed=request_id,
    )


def test_jobs_and_tiers_at_once_and_one_cancelled() -> None:
    config = FakeRunnerConfig(num_pages=400, page_size=8, vocab_size=VOCAB, fail_token=FAIL, num_host_pages=100)
    options = LoopOptions(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512)
    requests = {i: make(i) for i in range(9 * ROWS)}
    ended: dict[int, Finished] = {}
    with EngineService.start(config, options) as service:
        service.submit(list(requests.values())[: 5 * ROWS])
        is_cancelled = False
        started: set[int] = set()
        while len(ended) < len(requests):
            for one in service.poll(1.0):
                assert one.request_id not in ended
                ended[one.request_id] = one
            started |= set(service.take_started())
            if not is_cancelled and any(requests[i].job_id == "stops" for i in started):
                is_cancelled = True
                service.submit(list(requests.values())[5 * ROWS :])
                service.cancel_job("stops")
        stats = service.stats()
        # The last results and the counters are one message.
        assert stats is not None
    for i, one in ended.items():
        request = requests[i]
        if request.job_id == "stops":
            assert one.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        elif FAIL in request.prompt:
            assert (one.finish_reason, one.error) == (FinishReason.ERROR, "the fake model met its fail token 7")
        else:
            tokens, reason, _ = expected_tokens(request, VOCAB)
            # A drawn fail token ends a row too: not the prompt's fault, but an error all the same.
            if FAIL not in tokens[:-1]:
                assert (one.token_ids, one.finish_reason) == (tokens, reason)
    assert stats.work is not None
    assert {(work.job_id, work.tier) for work in stats.work} == {(job, tier) for job in JOBS for tier in Tier}
    counts = Counter((requests[i].job_id, requests[i].tier, one.finish_reason) for i, one in ended.items())
    for work in stats.work:
        by_reason = {reason: counts[work.job_id, work.tier, reason] for reason in FinishReason}
        assert work.finished == by_reason[FinishReason.STOP] + by_reason[FinishReason.LENGTH]
        assert (work.errors, work.aborted) == (by_reason[FinishReason.ERROR], by_reason[FinishReason.ABORT])
        assert work.finished + work.errors + work.aborted == ROWS
    assert sum(work.engine_ns for work in stats.work) + stats.idle_ns == stats.wall_ns
    assert sum(work.generated_tokens for work in stats.work) == stats.generated_tokens
    assert max(work.engine_ns for work in stats.work) < stats.wall_ns
