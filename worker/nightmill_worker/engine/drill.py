"""An engine that checks itself: a loop over the fake model, audited at every step, its answers compared."""

from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from nightmill.errors import EngineError
from nightmill_worker.engine.audit import audit_loop
from nightmill_worker.engine.fake import FakeRunner, FakeRunnerConfig, expected_tokens
from nightmill_worker.engine.fake_device import FakeDevice
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions, PreemptionMode
from nightmill_worker.engine.request import Finished, FinishReason, Request
from nightmill_worker.engine.step import HostShape, PoolShape, StepOutput, StepPlan
from nightmill_worker.engine.stop import Detokenize


class Drill:
    """Every operation raises EngineError as soon as an invariant breaks or an answer is not the expected one.

    Pages are poisoned the moment they become free, so what is read from them afterwards changes a token. With a
    `device_seed` in the config the runner works behind the loop's back.
    """

    def __init__(self, config: FakeRunnerConfig, options: LoopOptions, detokenize: Detokenize | None = None) -> None:
        self.runner = WatchedRunner(FakeRunner(config))
        if config.device_seed is not None:
            self.runner = WatchedDevice(FakeDevice(config))
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
        self.runner.audit()
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

    def __init__(self, fake: FakeRunner) -> None:
        self._fake = fake
        self._is_written = np.zeros(fake.pool.num_pages * fake.pool.page_size, np.bool_)
        self._was_written = np.zeros((fake.host.num_pages, fake.pool.page_size), np.bool_)
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

    def audit(self) -> None:
        """Between two steps."""

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


class WatchedDevice(WatchedRunner):
    """A FakeDevice, watched: pages of steps in flight, and who is scheduled although known to have ended."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        self._device = device
        self._in_use: deque[NDArray[np.int32]] = deque()  # pages of each step in flight
        self._being_written: deque[NDArray[np.int64]] = deque()  # of those, the ones that it writes

    def submit(self, plan: StepPlan) -> None:
        """See RunsAhead."""
        self.plans_seen += 1
        if self._loop is not None:
            self._check(plan, self._loop)
            self._check_ends(plan, self._loop)
        self._in_use.append(np.unique(plan.page_tables))
        self._being_written.append(np.unique(plan.slots // self.pool.page_size))
        self._device.submit(plan)

    def collect(self) -> StepOutput:
        """See RunsAhead."""
        output = self._device.collect()
        self._in_use.popleft()
        self._being_written.popleft()
        return output

    def audit(self) -> None:
        """See WatchedRunner."""
        if self._loop is not None:
            for pages in self._being_written:
                _require(not self._loop.pool.published[pages].any(), "a page is published when its step has ended (I3)")

    def _check_ends(self, plan: StepPlan, loop: EngineLoop) -> None:
        table, size = loop.table, self.pool.page_size
        batch = plan.sample
        writing = plan.page_tables[batch.sequence, (batch.position - 1) // size]
        owners = np.full(self.pool.num_pages, -1)
        for row in table.rows().tolist():
            owners[table.page_table[row, : table.num_pages[row]]] = row
        rows = owners[writing]  # nobody else holds the page that a sequence writes
        _require(bool((batch.position < table.max_total[rows]).all()), "nobody is scheduled past a known end")

    def _freed(self, pages: NDArray[np.int32]) -> None:
        for in_use in self._in_use:
            _require(not np.isin(pages, in_use).any(), "no page of a step in flight becomes free")
        super()._freed(pages)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise EngineError(f"invariant broken: {what}")
