"""A model without a model: any mistake of the scheduler, the pages or the prefix index shows as a wrong token.

Every token's K is a hash of (token, position). Its V is a hash of the K of all visible positions, *as read through
the page table*, so a page that belongs to another prefix is noticed even when its own tokens are the same. The next
token is a hash of the V of all visible positions, again as read through the page table, and of the sampling
parameters that matter. `expected_tokens` computes the same from the request alone, with plain integers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nightmill.errors import EngineError
from nightmill.sampling import SamplingParams
from nightmill_worker.engine.audit import audit_plan
from nightmill_worker.engine.request import FinishReason, Request, TokenLogprobs
from nightmill_worker.engine.step import NULL_PAGE, HostShape, PoolShape, SampleBatch, StepOutput, StepPlan
from nightmill_worker.engine.stop import Detokenize

_MASK = (1 << 64) - 1
_TOKEN, _POSITION, _SEED = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_POISON = 0xDEADBEEFDEADBEEF


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRunnerConfig:
    """Recipe of a FakeRunner that can cross a process border."""

    num_pages: int = 512
    page_size: int = 16
    vocab_size: int = 1000
    bytes_per_token: int = 16
    num_host_pages: int = 0
    host_bytes_per_s: float = 1e10
    fail_token: int | None = None  # a sequence that has this token in sight gets a row failure instead of a token
    crash_token: int | None = None  # computing this token raises EngineError
    device_seed: int | None = None  # set: a FakeDevice, which runs behind the caller's back

    def build(self) -> "FakeRunner":
        """Make the runner."""
        if self.device_seed is None:
            return FakeRunner(self)
        from nightmill_worker.engine.fake_device import FakeDevice

        return FakeDevice(self)


class FakeRunner:
    """A Runner over arrays of integers; checks every plan it is given."""

    def __init__(self, config: FakeRunnerConfig | None = None) -> None:
        self._config = config or FakeRunnerConfig()
        c = self._config
        self._pool = PoolShape(num_pages=c.num_pages, page_size=c.page_size, bytes_per_token=c.bytes_per_token)
        self._keys = np.full((c.num_pages, c.page_size), _POISON, np.uint64)
        self._values = np.full((c.num_pages, c.page_size), _POISON, np.uint64)
        self._host = np.full((c.num_host_pages, 2, c.page_size), _POISON, np.uint64)
        self.is_closed = False

    @property
    def pool(self) -> PoolShape:
        """See Runner."""
        return self._pool

    @property
    def vocab_size(self) -> int:
        """See Runner."""
        return self._config.vocab_size

    def run(self, plan: StepPlan) -> StepOutput:
        """See Runner."""
        self._check_open()
        audit_plan(plan, self._pool, self._config.vocab_size)
        if self._config.crash_token is not None and (plan.token_ids == self._config.crash_token).any():
            raise EngineError(f"the fake model met its crash token {self._config.crash_token}")
        hidden, failed = self._forward(plan)
        batch = plan.sample
        drawn = hidden[batch.sequence]
        tokens = _draw_batch(drawn, batch, self.vocab_size)
        logprobs = {
            i: _logprobs(int(drawn[i]), int(tokens[i]), int(batch.num_logprobs[i]), self.vocab_size)
            for i in np.flatnonzero(batch.num_logprobs >= 0).tolist()
        }
        reasons = dict.fromkeys(
            np.flatnonzero(failed[batch.sequence]).tolist(),
            f"the fake model met its fail token {self._config.fail_token}",
        )
        reasons |= {
            i: "every token is banned" for i, ids in batch.banned.items() if _is_everything(ids, self.vocab_size)
        }
        return StepOutput(tokens=tokens, logprobs=logprobs, failed=reasons)

    @property
    def host(self) -> HostShape:
        """See Swaps."""
        return HostShape(num_pages=self._config.num_host_pages, bytes_per_s=self._config.host_bytes_per_s)

    def swap_out(self, pages: NDArray[np.int32], host_pages: NDArray[np.int32]) -> None:
        """See Swaps."""
        self._check_copy(pages, host_pages)
        self._host[host_pages, 0] = self._keys[pages]
        self._host[host_pages, 1] = self._values[pages]

    def swap_in(self, host_pages: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
        """See Swaps."""
        self._check_copy(pages, host_pages)
        self._keys[pages] = self._host[host_pages, 0]
        self._values[pages] = self._host[host_pages, 1]

    def poison_host(self, host_pages: NDArray[np.int32]) -> None:
        """Fill host pages with garbage."""
        self._host[host_pages] = _POISON

    def poison(self, pages: NDArray[np.int32]) -> None:
        """Fill pages with garbage, as a test does with those that nobody holds."""
        self._keys[pages] = _POISON
        self._values[pages] = _POISON

    def close(self) -> None:
        """See Runner."""
        self.is_closed = True

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("this runner is closed")

    def _check_copy(self, pages: NDArray[np.int32], host_pages: NDArray[np.int32]) -> None:
        self._check_open()
        limits = ((pages, NULL_PAGE + 1, self._config.num_pages), (host_pages, 0, self._config.num_host_pages))
        for ids, first, end in limits:
            if len(ids) != len(pages) or len(np.unique(ids)) != len(ids) or (ids < first).any() or (ids >= end).any():
                raise EngineError(f"swap of pages {pages.tolist()} and host pages {host_pages.tolist()} is malformed")

    def _forward(self, plan: StepPlan) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """[S] hash of what each sequence's last token sees; [S] whether it sees the fail token."""
        page, offset = np.divmod(plan.slots, self._pool.page_size)
        keys = _keys(plan.token_ids, plan.positions)
        self._keys[page, offset] = keys
        shape = (plan.num_sequences, -1)
        seen = self._keys[plan.page_tables].reshape(shape)
        sequence = np.repeat(np.arange(plan.num_sequences), np.diff(plan.query_starts))
        # Weighted by place: two pages that have changed places would have the same sum.
        weights = _weights(seen.shape[1])
        sums = np.cumsum(seen * weights, axis=1, dtype=np.uint64)
        self._values[page, offset] = _mix(sums[sequence, plan.positions])
        sums = np.cumsum(self._values[plan.page_tables].reshape(shape) * weights, axis=1, dtype=np.uint64)
        last = plan.context_lens - 1
        failed = np.zeros(plan.num_sequences, np.bool_)
        if self._config.fail_token is not None:
            width = np.arange(seen.shape[1])
            bad = _keys(np.full(seen.shape[1], self._config.fail_token, np.int32), width.astype(np.int32))
            failed = ((seen == bad) & (width < plan.context_lens[:, None])).any(axis=1)
        return _mix(sums[np.arange(plan.num_sequences), last]), failed


def expected_tokens(
    request: Request, vocab_size: int, detokenize: Detokenize | None = None
) -> tuple[tuple[int, ...], FinishReason, str | int | None]:
    """What FakeRunner must answer to a request, whatever runs beside it: tokens, reason, stop match."""
    sampling = request.sampling
    stop_ids = {*request.eos_token_ids, *sampling.stop_token_ids}
    generated: list[int] = []
    previous_text = ""
    for token in _draws(request, vocab_size, stop_ids, generated):
        generated.append(token)
        is_armed = len(generated) > sampling.min_tokens
        text = detokenize(generated) if detokenize is not None and sampling.stop else ""
        ends = [(text.find(s, max(0, len(previous_text) - len(s) + 1)), s) for s in sampling.stop]
        previous_text = text
        if is_armed and token in stop_ids:
            return tuple(generated), FinishReason.STOP, token
        found = [(at, s) for at, s in ends if at >= 0]
        if is_armed and found:
            return tuple(generated), FinishReason.STOP, min(found, key=lambda pair: pair[0])[1]
        if len(generated) == sampling.max_tokens:
            break
    return tuple(generated), FinishReason.LENGTH, None


def _draws(request: Request, vocab_size: int, stop_ids: set[int], generated: list[int]) -> Iterator[int]:
    """Endless tokens after the prompt; the caller appends each to `generated` before it asks for the next."""
    sampling = request.sampling
    key_sum = value_sum = position = 0
    while True:
        tokens = request.prompt if position == 0 else generated[-1:]
        for token in tokens:
            weight = 2 * position + 1
            key_sum = (key_sum + weight * _mix_int(token * _TOKEN + position * _POSITION)) & _MASK
            value_sum = (value_sum + weight * _mix_int(key_sum)) & _MASK
            position += 1
        banned = stop_ids if len(generated) < sampling.min_tokens else set()
        history = (*request.prompt, *generated) if _has_penalties(sampling) else ()
        row = _Row(
            request.seed,
            position,
            _bits(0 if sampling.is_greedy else sampling.temperature),
            sampling.top_k,
            _bits(sampling.top_p) + 3 * _bits(sampling.min_p),
            _penalty_bits(sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty),
            history,
            len(request.prompt),
        )
        yield _draw(_mix_int(value_sum), row, banned, vocab_size)


@dataclass(frozen=True, slots=True)
class _Row:
    seed: int
    position: int
    temperature: int  # bits of a float32
    top_k: int
    truncation: int
    penalties: int  # 0: none
    history: Sequence[int]
    prompt_len: int


def _draw(hidden: int, row: _Row, banned: set[int], vocab_size: int) -> int:
    rank = 0
    if row.penalties:
        known = sum(_mix_int(t * _TOKEN + i) for i, t in enumerate(row.history)) + row.prompt_len * _POSITION
        hidden = _mix_int((hidden ^ row.penalties) + (known & _MASK))
    if row.temperature:
        state = _mix_int((row.seed ^ _SEED) + row.position * _POSITION)
        rank = _mix_int(state + row.temperature + row.truncation) % min(row.top_k or vocab_size, vocab_size)
    token = _mix_int(hidden + rank) % vocab_size
    while token in banned:
        token = (token + 1) % vocab_size
    return token


def _draw_batch(hidden: NDArray[np.uint64], batch: SampleBatch, vocab_size: int) -> NDArray[np.int32]:
    """Same as `_draw`, over arrays: rows with penalties or bans, which are rare, go one by one."""
    truncation = _float_bits(batch.top_p) + np.uint64(3) * _float_bits(batch.min_p)
    state = _mix((batch.seed ^ np.uint64(_SEED)) + batch.position.astype(np.uint64) * np.uint64(_POSITION))
    modulus = np.where(batch.top_k > 0, np.minimum(batch.top_k, vocab_size), vocab_size).astype(np.uint64)
    rank = _mix(state + _float_bits(batch.temperature) + truncation) % modulus
    rank[batch.temperature == 0] = 0
    tokens = (_mix(hidden + rank) % np.uint64(vocab_size)).astype(np.int32)
    penalised = (batch.presence_penalty != 0) | (batch.frequency_penalty != 0) | (batch.repetition_penalty != 1)
    for i in sorted({*np.flatnonzero(penalised).tolist(), *batch.banned}):
        history, prompt_len = batch.history[i] if penalised[i] else (np.empty(0, np.int32), 0)
        if penalised[i] and len(history) != batch.position[i]:
            raise EngineError(f"row {i}: history has {len(history)} tokens, {batch.position[i]} are visible")
        row = _Row(
            int(batch.seed[i]),
            int(batch.position[i]),
            int(_float_bits(batch.temperature[i : i + 1])[0]),
            int(batch.top_k[i]),
            int(truncation[i]),
            _penalty_bits(
                float(batch.presence_penalty[i]), float(batch.frequency_penalty[i]), float(batch.repetition_penalty[i])
            ),
            history.tolist(),
            prompt_len,
        )
        banned = batch.banned.get(i)
        if banned is not None and _is_everything(banned, vocab_size):
            continue  # the row fails
        tokens[i] = _draw(int(hidden[i]), row, set() if banned is None else set(banned.tolist()), vocab_size)
    return tokens


def _logprobs(hidden: int, token: int, count: int, vocab_size: int) -> TokenLogprobs:
    best = -float(hidden % 997) / 100
    top = tuple(((token + j) % vocab_size, best - j) for j in range(count))
    return TokenLogprobs(token_id=token, logprob=best, top=top)


def _is_everything(ids: NDArray[np.int32], vocab_size: int) -> bool:
    return len(ids) >= vocab_size and len(np.unique(ids)) == vocab_size


def _has_penalties(s: SamplingParams) -> bool:
    return s.presence_penalty != 0 or s.frequency_penalty != 0 or s.repetition_penalty != 1


def _penalty_bits(presence: float, frequency: float, repetition: float) -> int:
    if presence == 0 and frequency == 0 and repetition == 1:
        return 0
    return 1 + _bits(presence) + 5 * _bits(frequency) + 7 * _bits(repetition)


def _bits(value: float) -> int:
    return int(np.array([value], np.float32).view(np.uint32)[0])


def _float_bits(values: NDArray[np.float32]) -> NDArray[np.uint64]:
    return values.view(np.uint32).astype(np.uint64)


def _weights(width: int) -> NDArray[np.uint64]:
    return np.arange(1, 2 * width, 2, dtype=np.uint64)


def _keys(tokens: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.uint64]:
    return _mix(tokens.astype(np.uint64) * np.uint64(_TOKEN) + positions.astype(np.uint64) * np.uint64(_POSITION))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Splitmix64's finaliser (Steele, Lea, Flood 2014), over an array."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
