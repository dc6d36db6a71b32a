"""An engine that checks itself: a loop over the fake model, audited at every step, its answers compared."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from nightmill.errors import EngineError
from nightmill_worker.engine.audit import audit_loop
from nightmill_worker.engine.fake import FakeRunner, FakeRunnerConfig, expected_tokens
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions, PreemptionMode
from nightmill_worker.engine.request import Finished, FinishReason, Request
from nightmill_worker.engine.step import HostShape, PoolShape, StepOutput, StepPlan
from nightmill_worker.engine.stop import Detokenize


class Drill:
    """Every operation raises EngineError as soon as an invariant breaks or an answer is not the expected one.

    Pages are poisoned the moment they become free, so what is read from them afterwards changes a token.
    """

    def __init__(self, config: FakeRunnerConfig, options: LoopOptions, detokenize: Detokenize | None = None) -> None:
        self.runner = WatchedRunner(config)
        self.loop = EngineLoop(self.runner, options, detokenize)
        self.runner.watch(self.loop)
        self.answers: dict[int, Finished] = {}
        self.num_finished: Counter[int] = Counter()
        self._requests: dict[int, Request] = {}
        self._detokenize = detokenize

    def add(self, *requests: Request) -> None:
        """Add requests with ids never used before."""
        for request in requests:
            self._requests[request.request_id] = request
            self.loop.add(request)
        audit_loop(self.loop)

    def cancel(self, *request_ids: int) -> None:
        """Cancel requests in whatever state they are."""
        self.loop.cancel(request_ids)
        audit_loop(self.loop)

    def preempt(self, request_id: int, mode: PreemptionMode | None = None) -> bool:
        """Take a running request off."""
        was_running = self.loop.preempt(request_id, mode)
        audit_loop(self.loop)
        return was_running

    def step(self) -> list[Finished]:
        """One step; it must compute something or end something (I14)."""
        steps, had_work = self.loop.counters.steps, self.loop.has_work
        finished = self.loop.step()
        audit_loop(self.loop)
        if had_work and not finished and self.loop.counters.steps == steps:
            raise EngineError("invariant broken: every step makes progress (I14)")
        for answer in finished:
            self._check(answer)
        return finished

    def drain(self, max_steps: int = 100_000) -> dict[int, Finished]:
        """Step until nothing is left; then every request has one answer (I9) and no page is held (I10)."""
        for _ in range(max_steps):
            if not self.loop.has_work:
                break
            self.step()
        if self.loop.has_work:
            raise EngineError(f"invariant broken: the work ends; it has not after {max_steps} steps")
        if self.answers.keys() != self._requests.keys():
            raise EngineError(
                f"invariant broken: every request ends (I9): {self._requests.keys() - self.answers.keys()}"
            )
        if self.loop.pool.num_active or self.loop.pool.num_in_flight:
            raise EngineError("invariant broken: after a drain no page is held (I10)")
        if self.loop.swap is not None and (self.loop.swap.num_swapped or self.loop.swap.host.num_used):
            raise EngineError("invariant broken: after a drain no host page is held (I10)")
        return self.answers

    def _check(self, answer: Finished) -> None:
        key = answer.request_id
        self.num_finished[key] += 1
        self.answers[key] = answer
        if self.num_finished[key] > 1:
            raise EngineError(f"invariant broken: request {key} ended twice (I9)")
        expected = expected_tokens(self._requests[key], self.runner.vocab_size, self._detokenize)
        if answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            if (answer.token_ids, answer.finish_reason, answer.stop_match) != expected:
                raise EngineError(f"invariant broken: request {key} got {answer}, expected {expected} (I11, I12)")
        elif answer.token_ids != expected[0][: len(answer.token_ids)]:
            raise EngineError(f"invariant broken: request {key} was cut off with wrong tokens {answer} (I11, I12)")


class WatchedRunner:
    """A FakeRunner that knows the loop it serves, and checks each plan against it."""

    def __init__(self, config: FakeRunnerConfig) -> None:
        self._fake = FakeRunner(config)
        self._is_written = np.zeros(config.num_pages * config.page_size, np.bool_)
        self._was_written = np.zeros((config.num_host_pages, config.page_size), np.bool_)
        self._loop: EngineLoop | None = None
        self.plans_seen = 0

    @property
    def pool(self) -> PoolShape:
        """See Runner."""
        return self._fake.pool

    @property
    def vocab_size(self) -> int:
        """See Runner."""
        return self._fake.vocab_size

    @property
    def host(self) -> HostShape:
        """See Swaps."""
        return self._fake.host

    def swap_out(self, pages: NDArray[np.int32], host_pages: NDArray[np.int32]) -> None:
        """See Swaps."""
        if self._loop is not None:
            _require(
                bool((self._loop.pool.refcount[pages] == 1).all()), "only pages without another holder are swapped"
            )
        self._was_written[host_pages] = self._written[pages]
        self._fake.swap_out(pages, host_pages)

    def swap_in(self, host_pages: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
        """See Swaps."""
        if self._loop is not None:
            pool = self._loop.pool
            _require(bool((pool.refcount[pages] == 1).all()), "a page being restored has one owner (I3)")
            _require(not pool.published[pages].any(), "a published page is not written (I3)")
        _require(not self._written[pages].any(), "each position is written once per residency (I6)")
        self._written[pages] = self._was_written[host_pages]
        self._fake.swap_in(host_pages, pages)

    def watch(self, loop: EngineLoop) -> None:
        """Check plans against this loop from now on."""
        self._loop = loop
        loop.pool.on_free = self._freed
        if loop.swap is not None:
            loop.swap.host.on_free = self._fake.poison_host

    def run(self, plan: StepPlan) -> StepOutput:
        """See Runner."""
        self.plans_seen += 1
        if self._loop is not None:
            self._check(plan, self._loop)
        return self._fake.run(plan)

    def close(self) -> None:
        """See Runner."""
        self._fake.close()

    def _check(self, plan: StepPlan, loop: EngineLoop) -> None:
        options, pool = loop.options, loop.pool
        slots = plan.slots[plan.slots >= pool.page_size]
        pages = np.unique(slots // pool.page_size)
        _require(plan.num_tokens <= options.max_num_batched_tokens, "the step's token budget holds (I8)")
        _require(plan.num_sequences <= options.max_num_seqs, "max_num_seqs holds (I8)")
        _require(bool((pool.refcount[pages] == 1).all()), "a page being written has one owner (I3)")
        _require(not pool.published[pages].any(), "a published page is not written (I3)")
        _require(not self._is_written[slots].any(), "each position is written once per residency (I6)")
        self._is_written[slots] = True

    def _freed(self, pages: NDArray[np.int32]) -> None:
        self._fake.poison(pages)
        self._written[pages] = False

    @property
    def _written(self) -> NDArray[np.bool_]:
        """[pages, page_size], a view."""
        return self._is_written.reshape(-1, self.pool.page_size)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise EngineError(f"invariant broken: {what}")
