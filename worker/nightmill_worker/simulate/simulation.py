"""Runs a trace through the real engine loop on simulated time."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from nightmill.errors import ConfigError, EngineError
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.growth import DEFAULT_RESERVE
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import AdmissionRule, EvictionRule, LoopOptions, Policy, QueueOrder
from nightmill_worker.engine.request import Finished, FinishReason, Request
from nightmill_worker.engine.stats import EngineStats
from nightmill_worker.engine.step import HostShape, PoolShape, StepPlan
from nightmill_worker.simulate.cost_model import CostModel
from nightmill_worker.simulate.recorder import Recorder
from nightmill_worker.simulate.simulated_runner import EOS_TOKEN, SimulatedRunner
from nightmill_worker.simulate.trace import Trace

_FIRST_ROW_TOKEN = 2  # below: EOS and the one token that answers are made of
_DEFAULT_MAX_TOKENS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What is simulated."""

    cost: CostModel
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    pool_tokens: int | None = None  # None: what the device has beside the weights
    page_size: int = 16
    host_tokens: int | None = (
        None  # of the host pool that preempted sequences swap to; None: a quarter of the page pool
    )
    is_length_known: bool = True  # the scheduler may look at the answer's length, as with ignore_eos
    max_tokens: int | None = None  # cuts answers off; None: nothing does (unknown lengths: 1,000, or the longest)
    admission: AdmissionRule = AdmissionRule.GROWTH
    order: QueueOrder = QueueOrder.PLANNED
    eviction: EvictionRule = EvictionRule.FUTURE
    lookahead: int = 4096  # requests of a tier that wait in the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One policy's run."""

    policy: Policy
    recorder: Recorder
    stats: EngineStats
    num_pages: int  # of the pool
    output_lens: tuple[int, ...]  # by row, after max_tokens
    failed: dict[int, str]  # rows that can never run, and why


class Simulation:
    """One trace on one engine.

    Raises:
        ConfigError: the pool cannot hold a page.
    """

    def __init__(self, trace: Trace, options: SimulationOptions, policy: Policy) -> None:
        self._trace = trace
        self._options = options
        longest = max(row.generated_tokens for row in trace.rows)
        default_cap = options.max_tokens or max(_DEFAULT_MAX_TOKENS, longest)
        self._caps = [row.max_tokens or default_cap for row in trace.rows]
        self._output_lens = [min(row.generated_tokens, cap) for row, cap in zip(trace.rows, self._caps, strict=True)]
        prefixes = {row.prefix_id for row in trace.rows if row.prefix_id is not None}
        self._prefix_token = {name: _FIRST_ROW_TOKEN + len(trace) + i for i, name in enumerate(sorted(prefixes))}
        self._recorder = Recorder(len(trace))
        self._failed: dict[int, str] = {}
        self._loop = EngineLoop(self._runner(), self._loop_options(policy))
        self._policy = policy
        # By tier, in order of arrival; static batches take rows in file order whatever their tier.
        arrivals = sorted(range(len(trace)), key=lambda i: (trace.rows[i].arrival_s, i))
        lines = {tier: deque(i for i in arrivals if trace.rows[i].tier is tier) for tier in Tier}
        self._lines = {Tier.NORMAL: deque(range(len(trace)))} if policy is Policy.STATIC else lines
        self._waiting = dict.fromkeys(self._lines, 0)

    def run(self, progress: Callable[[int], None] | None = None) -> SimulationResult:
        """Run until everything has ended; `progress` gets the number of requests just ended.

        Raises:
            EngineError: the scheduler makes no step although requests wait.
        """
        recorder, loop = self._recorder, self._loop
        while self._feed() or loop.has_work:
            steps = recorder.steps
            ended = loop.step()
            if recorder.steps == steps and not ended:
                raise EngineError(f"the scheduler stands still after {steps} steps: {loop.stats()}")
            if recorder.steps > steps:
                rows = loop.table.rows()
                self._note_admitted(recorder.running(loop.table.seed[rows].astype(np.int64)))
            self._note_ended(ended)
            if progress is not None and ended:
                progress(len(ended))
        return SimulationResult(
            policy=self._policy,
            recorder=recorder,
            stats=loop.stats(),
            num_pages=loop.pool.num_usable,
            output_lens=tuple(self._output_lens),
            failed=self._failed,
        )

    def _feed(self) -> bool:
        """Let what has arrived into the look-ahead; False when nothing was added."""
        if not self._loop.has_work:
            next_arrivals = [self._trace.rows[line[0]].arrival_s for line in self._lines.values() if line]
            if next_arrivals:
                self._recorder.clock_s = max(self._recorder.clock_s, min(next_arrivals))
        added = False
        for tier, line in self._lines.items():
            while line and self._waiting[tier] < self._options.lookahead:
                if self._trace.rows[line[0]].arrival_s > self._recorder.clock_s:
                    break
                self._loop.add(self._request(line.popleft(), tier))
                self._waiting[tier] += 1
                added = True
        return added

    def _note_admitted(self, requests: Iterable[int]) -> None:
        for request in requests:
            self._waiting[self._line_of(int(request))] -= 1

    def _note_ended(self, ended: list[Finished]) -> None:
        for finished in ended:
            request = finished.request_id
            if finished.finish_reason is FinishReason.ERROR:
                self._failed[request] = finished.error or "unknown"
            elif len(finished.token_ids) != self._output_lens[request]:
                raise EngineError(
                    f"request {request} ended with {len(finished.token_ids)} tokens, not {self._output_lens[request]}"
                )
            if self._recorder.admit_step[request] < 0:
                # Admitted and ended in one step, or refused.
                self._waiting[self._line_of(request)] -= 1
                if finished.finish_reason is not FinishReason.ERROR:
                    self._recorder.running(np.array([request]))
            if finished.finish_reason is not FinishReason.ERROR:
                self._recorder.finished(request, finished.num_preemptions)

    def _line_of(self, request: int) -> Tier:
        return Tier.NORMAL if self._policy is Policy.STATIC else self._trace.rows[request].tier

    def _request(self, index: int, tier: Tier) -> Request:
        row, options = self._trace.rows[index], self._options
        shared = row.prefix_tokens if row.prefix_id is not None else 0
        prompt = (_FIRST_ROW_TOKEN + index,) * (row.context_tokens - shared)
        if row.prefix_id is not None and shared:
            prompt = (self._prefix_token[row.prefix_id],) * shared + prompt
        known = options.is_length_known
        return Request(
            request_id=index,
            job_id=row.job_id,
            tier=tier,
            prompt=prompt,
            sampling=SamplingParams(
                max_tokens=self._output_lens[index] if known else self._caps[index], ignore_eos=known
            ),
            seed=index,
            eos_token_ids=() if known else (EOS_TOKEN,),
        )

    def _runner(self) -> SimulatedRunner:
        options = self._options
        tokens = options.cost.pool_tokens() if options.pool_tokens is None else options.pool_tokens
        pages = tokens // options.page_size
        if pages < 1:
            raise ConfigError(
                f"a pool of {tokens} tokens has no page of {options.page_size}",
                hint="Give more --pool-tokens, or a smaller model or a larger device.",
            )
        shape = PoolShape(
            num_pages=pages + 1,  # and the null page
            page_size=options.page_size,
            bytes_per_token=options.cost.model.kv_bytes_per_token,
        )
        host_tokens = tokens // 4 if options.host_tokens is None else options.host_tokens
        host = HostShape(num_pages=host_tokens // options.page_size, bytes_per_s=options.cost.device.host_bytes_per_s)
        prompts = np.array([row.context_tokens for row in self._trace.rows], np.int64)
        vocab_size = _FIRST_ROW_TOKEN + len(self._trace) + len(self._prefix_token)
        return SimulatedRunner(
            options.cost, shape, host, vocab_size, prompts, np.array(self._output_lens, np.int64), self._observe
        )

    def _observe(self, plan: StepPlan, seconds: float) -> None:
        self._recorder.step(seconds, plan.num_sequences, self._loop.pool.num_active)
        self._recorder.drew(plan.sample.seed.astype(np.int64))

    def _loop_options(self, policy: Policy) -> LoopOptions:
        options = self._options
        caps = self._output_lens if options.is_length_known else self._caps
        longest = max(row.context_tokens + cap for row, cap in zip(self._trace.rows, caps, strict=True))
        return LoopOptions(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            enable_prefix_caching=self._trace.has_prefixes,
            max_model_len=longest,
            policy=policy,
            order=options.order,
            admission=options.admission,
            eviction=options.eviction,
            # Nobody is to be kept a place for where nobody more urgent will come.
            tier_reserve=DEFAULT_RESERVE if len({row.tier for row in self._trace.rows}) > 1 else 0.0,
        )
