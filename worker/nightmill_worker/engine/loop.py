"""The engine's loop: plan, run, commit, finish. One thread."""

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nightmill.errors import EngineError
from nightmill_worker.engine.accounting import Accounting
from nightmill_worker.engine.admission import AdmissionGate, ReserveGate, WatermarkGate
from nightmill_worker.engine.commit import Ending
from nightmill_worker.engine.exit import Exit
from nightmill_worker.engine.fairness import TierShares
from nightmill_worker.engine.flight import FlightRecorder
from nightmill_worker.engine.groups import GroupFinder
from nightmill_worker.engine.growth_gate import GrowthGate, is_length_known
from nightmill_worker.engine.host_pool import HostPool
from nightmill_worker.engine.ledger import Ledger
from nightmill_worker.engine.length_model import LengthModel
from nightmill_worker.engine.options import AdmissionRule, EvictionRule, LoopOptions, Policy, PreemptionMode, QueueOrder
from nightmill_worker.engine.ordering import ArrivalQueue, PlannedQueue, TierQueue
from nightmill_worker.engine.packing import Packer
from nightmill_worker.engine.page_pool import PagePool
from nightmill_worker.engine.preemption import Preemption, PreemptionCause, PreemptionCost
from nightmill_worker.engine.prefix_index import PrefixIndex
from nightmill_worker.engine.refusal import reason_to_refuse
from nightmill_worker.engine.request import Finished, FinishReason, Request
from nightmill_worker.engine.residency import Residency
from nightmill_worker.engine.roofline import HasRoofline
from nightmill_worker.engine.run_ahead import AheadStepper
from nightmill_worker.engine.running_table import Rows, RunningTable
from nightmill_worker.engine.scheduler import Schedule, Scheduler
from nightmill_worker.engine.sequence import Sequence as EngineSequence
from nightmill_worker.engine.sequence import SequenceState
from nightmill_worker.engine.stats import Counters, EngineStats, WorkStats
from nightmill_worker.engine.step import Runner, RunsAhead, Swaps
from nightmill_worker.engine.stepper import StepParts, Stepper
from nightmill_worker.engine.stop import StopStrings
from nightmill_worker.engine.swap import Swap
from nightmill_worker.engine.victims import VictimChooser
from nightmill_worker.engine.waiting_queue import WaitingQueue


class EngineLoop:
    """Continuous batching over a Runner.

    Args:
        runner: Executes steps; the loop closes it.
        options: Limits and policy.
        detokenize: Token ids to text, for stop strings. It may be called with any run of generated tokens.
    """

    def __init__(
        self,
        runner: Runner,
        options: LoopOptions,
        detokenize: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.options = options
        self.pool = PagePool(runner.pool)
        self.index = PrefixIndex(self.pool) if options.enable_prefix_caching else None
        self.table = RunningTable(
            options.max_num_seqs, options.max_model_len, self.pool.page_size, vocab_size=runner.vocab_size
        )
        self.lengths = LengthModel()
        self.queue = WaitingQueue(self._tier_queue)
        self.counters = Counters()
        self.residency = Residency(self.table, self.pool, self.index)
        self.gate = self._gate()
        self.swap = self._make_swap(runner)
        self.preemption_cost = PreemptionCost(runner.pool.bytes_per_token, _host_bytes_per_s(runner))
        self.preemption = Preemption(
            options.preemption,
            self.table,
            self.queue,
            self.residency,
            self.swap,
            self.preemption_cost,
            self.counters,
            is_wanting=options.eviction is EvictionRule.FUTURE,
        )
        self.shares = TierShares(options.tier_shares, options.share_window_tokens)
        self.scheduler = Scheduler(
            options,
            self.table,
            self.queue,
            self.residency,
            self.gate,
            VictimChooser(self.table, self.pool, self._expected_remaining()),
            self.preemption,
            self.counters,
            self.shares,
        )
        self._runner = runner
        self._detokenize = detokenize
        self._live: dict[int, EngineSequence] = {}
        self._num_added = 0
        self.on_start: Callable[[Sequence[int]], None] = _ignore
        """Told the ids of requests before the step that runs them for the first time."""
        self.ledger = Ledger()
        self._exit = Exit(
            self.table,
            self.queue,
            self.residency,
            self.swap,
            self.gate,
            self.counters,
            self.ledger,
            pads=options.policy is Policy.STATIC,
        )
        self._stepper = self._make_stepper(runner)
        self._left_at: float | None = None  # when the last step ended, with work left

    @property
    def is_running(self) -> bool:
        """Some sequence has a row of the running table."""
        return self.table.num_used > 0

    @property
    def has_work(self) -> bool:
        """A call of `step` would do or return something."""
        return bool(self._live or self._exit.has_finished or self._stepper.num_in_flight)

    @property
    def num_in_flight(self) -> int:
        """Steps that were submitted and have not been committed; always 0 where steps do not run ahead."""
        return self._stepper.num_in_flight

    @property
    def flight(self) -> FlightRecorder | None:
        """Is shown each step before it runs."""
        return self._stepper.flight

    @flight.setter
    def flight(self, recorder: FlightRecorder | None) -> None:
        self._stepper.flight = recorder

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run gets its Finished, with ERROR, from the next step.

        Raises:
            EngineError: a request with this id is live.
        """
        if request.request_id in self._live:
            raise EngineError(f"request {request.request_id} is already in the engine; ids of live requests are unique")
        self._num_added += 1
        sequence = EngineSequence(request, self._num_added, entry=self.ledger.entry(request.job_id, request.tier))
        reason = reason_to_refuse(
            request,
            max_model_len=self.options.max_model_len,
            pool=self.pool,
            vocab_size=self._runner.vocab_size,
            has_text=self._detokenize is not None,
        )
        if reason is not None:
            self._exit.refuse(sequence, reason)
            return
        if request.sampling.stop and self._detokenize is not None:
            sequence.stop = StopStrings(request.sampling.stop, self._detokenize)
        if request.sampling.logprobs is not None:
            sequence.logprobs = []
        self._live[request.request_id] = sequence
        self._exit.expect(sequence)
        if self._looks_ahead:
            self.residency.want(sequence)
        sequence.expected_tokens = self._expected_tokens(sequence)
        self.ledger.begin(sequence.entry, _expected_work(sequence))
        self.queue.push(sequence, sequence.expected_tokens)

    def cancel(self, request_ids: Iterable[int]) -> None:
        """End requests; each that is still live gets its Finished, with ABORT, from the next step."""
        for request_id in request_ids:
            sequence = self._live.get(request_id)
            if sequence is not None:
                self._end(sequence, FinishReason.ABORT)

    def cancel_job(self, job_id: str) -> None:
        """End all requests of a job."""
        self.cancel([key for key, sequence in self._live.items() if sequence.request.job_id == job_id])

    def recall(self) -> None:
        """End, with ABORT, every request that has never been admitted."""
        self.cancel([key for key, sequence in self._live.items() if sequence.num_cached is None])

    def step(self) -> list[Finished]:
        """Complete one step and return what ended since the last call. When it runs ahead, the next is under way."""
        started = time.perf_counter()
        if self._left_at is None:
            self.ledger.idle()
        else:
            self.counters.wait_s += started - self._left_at
        if self._stepper.step(started):
            self.ledger.charge()
        else:
            self.ledger.idle()
        self._left_at = time.perf_counter() if self._live or self._stepper.num_in_flight else None
        return self._exit.take()

    def _decide(self, *, ahead: bool = False) -> Schedule:
        schedule = self.scheduler.schedule(ahead=True) if ahead else self.scheduler.schedule()
        if schedule.outgrown is not None:
            self._end_outgrown(schedule.outgrown)
            schedule = self.scheduler.schedule()
        if newcomers := self.scheduler.take_started():
            self._welcome(newcomers)
        return schedule

    def _end_outgrown(self, sequence: EngineSequence) -> None:
        usable, size = self.pool.num_usable, self.pool.page_size
        needed = int(self.table.num_tokens[sequence.row]) if sequence.row >= 0 else sequence.num_tokens
        message = f"needs pages for {needed} tokens; the pool has {usable} of {size} tokens each"
        self._end(sequence, FinishReason.ERROR, error=message)

    def _welcome(self, request_ids: list[int]) -> None:
        """They have been admitted for the first time; some may be gone already."""
        for request_id in request_ids:
            sequence = self._live.get(request_id)
            if sequence is not None:
                num_prompt, num_cached = len(sequence.request.prompt), sequence.num_cached or 0
                self.ledger.admit(sequence.entry, _expected_work(sequence), num_prompt, num_cached)
        self.on_start(request_ids)

    def preempt(self, request_id: int, mode: PreemptionMode | None = None) -> bool:
        """Take a running sequence off; False when it does not run. For tests and drills.

        Args:
            request_id: A live request.
            mode: By swap or by recompute; None: as the engine would.
        """
        self._stepper.settle()
        sequence = self._live.get(request_id)
        if sequence is None or sequence.state is not SequenceState.RUNNING or self.options.policy is Policy.STATIC:
            return False
        self.preemption.take_off(sequence, PreemptionCause.DRILL, mode)
        return True

    def stats(self, *, with_work: bool = True) -> EngineStats:
        """Totals and the present state; `with_work`: of each job, too, which takes longer the more there are."""
        if not self.has_work:
            self.ledger.idle()
        c = self.counters
        return EngineStats(
            steps=c.steps,
            steps_ahead=c.steps_ahead,
            finished=c.finished,
            errors=c.errors,
            aborted=c.aborted,
            prompt_tokens=c.prompt_tokens,
            cached_tokens=c.cached_tokens,
            computed_tokens=c.computed_tokens,
            recomputed_tokens=c.recomputed_tokens,
            padding_tokens=c.padding_tokens,
            generated_tokens=c.generated_tokens,
            running=len(self._live) - len(self.queue),
            waiting=len(self.queue),
            parked=self.queue.num_parked,
            preemptions=c.preemptions,
            preemptions_memory=c.preemptions_memory,
            preemptions_tier=c.preemptions_tier,
            preemptions_swap=c.preemptions_swap,
            preemptions_memory_swap=c.preemptions_memory_swap,
            preemptions_tier_swap=c.preemptions_tier_swap,
            swapped=0 if self.swap is None else self.swap.num_swapped,
            host_pages_total=0 if self.swap is None else self.swap.host.num_pages,
            host_pages_used=0 if self.swap is None else self.swap.host.num_used,
            pages_total=self.pool.num_usable,
            pages_free=self.pool.num_free,
            pages_cached=self.pool.num_cached,
            pages_active=self.pool.num_active,
            pages_in_flight=self.pool.num_in_flight,
            peak_pages=c.peak_pages,
            predicted_peak_pages=self.gate.predicted_peak if isinstance(self.gate, GrowthGate) else None,
            z=self.gate.margin.z if isinstance(self.gate, GrowthGate) else None,
            evictions=0 if self.index is None else self.index.num_evictions,
            wanted_evictions=0 if self.index is None else self.index.num_wanted_evictions,
            shared_attention_rows=c.shared_attention_rows,
            shared_attention_bytes_saved=c.shared_attention_bytes,
            mean_batch=c.batch_rows / c.steps if c.steps else 0.0,
            plan_s=c.plan_s,
            build_s=c.build_s,
            wait_s=c.wait_s,
            run_s=c.run_s,
            device_s=c.device_s,
            commit_s=c.commit_s,
            bound_s=c.bound_s,
            bytes=c.bytes,
            flops=c.flops,
            wall_ns=self.ledger.wall_ns,
            idle_ns=self.ledger.idle_ns,
            work=self._work() if with_work else None,
        )

    def _work(self) -> tuple[WorkStats, ...]:
        table, rows = self.table, self.table.rows()
        rows = rows[~table.is_padding[rows]]
        draws = (table.max_total - table.num_tokens)[rows]
        if isinstance(self.gate, GrowthGate) and len(rows):
            draws = self.gate.expected_remaining(rows)
        # The last token drawn is never computed.
        remaining = (table.num_tokens - table.num_computed)[rows] + draws - 1
        swapped = [] if self.swap is None else [sequence.entry for sequence in self.swap.all_saved()]
        return self.ledger.snapshot(table.entry[rows], remaining, np.array(swapped, np.int64))

    def close(self) -> None:
        """Release the runner. Live requests get no Finished."""
        self._runner.close()

    def _end_row(self, ending: Ending) -> None:
        sequence = self.table.sequence(ending.row)
        self._end(sequence, ending.reason, stop_match=ending.stop_match, error=ending.error)

    def _end(
        self,
        sequence: EngineSequence,
        reason: FinishReason,
        *,
        stop_match: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """The one way out, from every state."""
        del self._live[sequence.request.request_id]
        work = _expected_work(sequence)
        self._exit.end(sequence, reason, expected_work=work, stop_match=stop_match, error=error)

    def _make_stepper(self, runner: Runner) -> Stepper:
        options = self.options
        is_static = options.policy is Policy.STATIC
        # Without the prefix index no two sequences have a page in common.
        shares = options.enable_shared_attention and options.enable_prefix_caching
        groups = GroupFinder(self.pool.page_size, self.pool.refcount) if shares else None
        parts = StepParts(
            table=self.table,
            packer=Packer(self.table, options.max_num_batched_tokens, groups),
            residency=self.residency,
            accounting=Accounting(
                self.table,
                self.pool,
                self.queue,
                self.counters,
                self.ledger,
                None if is_static else self.shares,
                runner.pool.bytes_per_token,
                runner.roofline if isinstance(runner, HasRoofline) else None,
            ),
            cost=self.preemption_cost,
            counters=self.counters,
            decide=self._decide,
            end=self._end_row,
        )
        if options.async_scheduling and not is_static and isinstance(runner, RunsAhead):
            return AheadStepper(runner, runner, parts)
        return Stepper(runner, parts)

    def _make_swap(self, runner: Runner) -> Swap | None:
        if self.options.policy is Policy.STATIC or not isinstance(runner, Swaps) or runner.host.num_pages == 0:
            return None
        return Swap(runner, HostPool(runner.host.num_pages), self.table, self.pool)

    def _gate(self) -> AdmissionGate:
        if self.options.policy is Policy.STATIC or self.options.admission is AdmissionRule.RESERVE:
            return ReserveGate(self.table, self.pool.num_usable)
        if self.options.admission is AdmissionRule.GREEDY:
            return WatermarkGate(self.table)
        return GrowthGate(self.options, self.table, self.pool, self.lengths)

    def _expected_remaining(self) -> Callable[[Rows], NDArray[np.int64]] | None:
        return self.gate.expected_remaining if isinstance(self.gate, GrowthGate) else None

    def _tier_queue(self) -> TierQueue:
        if self.options.policy is Policy.STATIC or self.options.order is QueueOrder.ARRIVAL:
            return ArrivalQueue()
        return PlannedQueue(self.options.max_num_seqs)

    @property
    def _looks_ahead(self) -> bool:
        options = self.options
        return options.order is QueueOrder.PLANNED or options.eviction is EvictionRule.FUTURE

    def _expected_tokens(self, sequence: EngineSequence) -> int:
        request = sequence.request
        if is_length_known(sequence):
            return request.sampling.max_tokens
        return self.lengths.expected(request.job_id, request.tier.value, request.sampling.max_tokens)


def _expected_work(sequence: EngineSequence) -> int:
    """Tokens to compute for a request that has not been admitted."""
    return len(sequence.request.prompt) + sequence.expected_tokens


def _ignore(request_ids: Sequence[int]) -> None:
    pass


def _host_bytes_per_s(runner: Runner) -> float:
    return runner.host.bytes_per_s if isinstance(runner, Swaps) else 1.0
