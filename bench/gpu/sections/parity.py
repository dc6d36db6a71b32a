"""Answers of the runner on this device are transformers', however the engine schedules; a swap restores every bit.

The judge is transformers in fp32 on the same device, with the same (rounded) weights: its argmax after our own tokens,
position by position. Another token is allowed only where its logit is within rounding of the best: see the comparator.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.engine_run import engine_options, loop_options, opened, start
from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from bench.gpu.sections.parity_models import SUBJECTS, TINY, VOCAB, Subject, load, save
from bench.gpu.switches import GRAPHS, RUN_AHEAD
from nightmill.canonical import encode
from nightmill.records import ModelSpec
from nightmill.sampling import SamplingParams
from nightmill_worker.bench.comparator import Comparison, ReferenceStep, compare_greedy
from nightmill_worker.engine.options import LoopOptions, PreemptionMode
from nightmill_worker.engine.step import Swaps
from nightmill_worker.model import config_reader
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.device_runner import DeviceRunner

MAX_MODEL_LEN = 512
MAX_TOKENS = 24
FP32_LOGITS = 1e-4
"""Relative error of logits: some hundred fp32 roundings; a dot product in tf32 gives 3e-4 and more."""
BF16_LOGITS = 2.0
"""Times the error transformers itself has in bf16."""
Prompts = list[tuple[int, ...]]


def run(notebook: Notebook, task: Task) -> None:
    # transformers is here already: a process of its own for each config would cost seconds each.
    config_reader._read_apart = lambda directory: encode(ModelConfig.from_directory(directory))
    subjects = TINY if task.is_tiny else SUBJECTS
    compared = 0
    for subject in subjects:
        if subject is not subjects[0] and not notebook.has_time_for(str(subject), 8):
            continue
        with tempfile.TemporaryDirectory() as scratch, notebook.attempt(str(subject)):
            _compare(notebook, task, subject, Path(scratch))
            compared += 1
    notebook.figure("models compared", compared, f"of {len(subjects)}", headline=True)
    notebook.check("every model was compared", compared == len(subjects))


def _compare(notebook: Notebook, task: Task, subject: Subject, directory: Path) -> None:
    save(subject, directory)
    judge = Judge(directory, subject, task.device)
    control = judge.control(prompts())
    notebook.check(
        f"{subject}: transformers in this dtype passes the same comparison",
        not control.failures,
        f"{control.num_rows} tokens, {len(control.near_ties)} near ties, {len(control.failures)} failures",
    )
    with opened(_build(directory, subject, task)) as runner:
        _logits(notebook, runner, subject, judge)
        base = _schedules(notebook, runner, subject, judge)
        _swap_restores_every_bit(notebook, runner, subject)
    if GRAPHS.can_compare:
        with opened(_build(directory, subject, task, **GRAPHS.off)) as runner:
            tokens = _answers(runner, _options())
            _judge(notebook, judge, subject, GRAPHS.without, tokens, base)


def _build(directory: Path, subject: Subject, task: Task, **changes: Any) -> DeviceRunner:
    spec = ModelSpec(model=str(subject), dtype=subject.dtype, max_model_len=MAX_MODEL_LEN)
    limits = {"max_num_seqs": 16, "pool_bytes": 128 << 20, "swap_bytes": 32 << 20}
    return start(directory, spec, engine_options(task.device, **limits, **changes))


class Judge:
    """transformers' logits, in fp32."""

    def __init__(self, directory: Path, subject: Subject, device: str) -> None:
        self._model = load(directory, torch.float32, device)
        # The same weights, computed with as the subject computes.
        self._rounded = load(directory, getattr(torch, subject.dtype), device)
        self._subject = subject
        self._device = device
        self._steps: dict[tuple[tuple[int, ...], tuple[int, ...]], list[ReferenceStep]] = {}

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), V]."""
        return self._logits_of(self._model, tokens)

    def rounded_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """As transformers computes them in the subject's dtype."""
        return self._logits_of(self._rounded, tokens)

    @torch.inference_mode()
    def _logits_of(self, model: Any, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(tokens)], device=self._device)
        return model(ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]

    def control(self, texts: Prompts) -> Comparison:
        """transformers in the subject's dtype judged as we are: one that fails here could prove nothing."""
        steps = [[step] for text in texts for step in _reference_steps(self.logits(text))]
        drawn = [[token] for text in texts for token in self.rounded_logits(text).argmax(-1).tolist()]
        return compare_greedy(steps, drawn, dtype=self._subject.dtype)

    def compare(self, prompts: Prompts, answers: Sequence[tuple[int, ...]]) -> Comparison:
        """Judge every token of every answer, each after our own tokens before it."""
        steps = [step for pair in zip(prompts, answers, strict=True) for step in self._along(*pair)]
        tokens = [[token] for answer in answers for token in answer]
        return compare_greedy([[step] for step in steps], tokens, dtype=self._subject.dtype)

    def _along(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[ReferenceStep]:
        key = (prompt, answer)
        if key not in self._steps:
            self._steps[key] = _reference_steps(self.logits(prompt + answer)[len(prompt) - 1 : -1])
        return self._steps[key]


def _reference_steps(logits: torch.Tensor) -> list[ReferenceStep]:
    """What was drawn at each position of [n, V], and what came close."""
    best, peaks = logits.topk(20), logits.abs().amax(dim=-1).tolist()
    return [
        ReferenceStep(ids[0], dict(zip(ids, values, strict=True)), peak)
        for ids, values, peak in zip(best.indices.tolist(), best.values.tolist(), peaks, strict=True)
    ]


def prompts() -> Prompts:
    """Two prefixes with six rows each, enough for groups; four rows without; lengths around pages and windows."""
    rng = np.random.default_rng(3)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, VOCAB, length).tolist())

    stems = (ids(140), ids(170), ())
    sizes = (0, 1, 0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2)
    return [stems[stem] + ids(1 + 5 * row if stem < 2 else 15 + row) for row, stem in enumerate(sizes)]


def _options(**changes: Any) -> LoopOptions:
    return loop_options(**({"max_num_seqs": 16, "max_model_len": MAX_MODEL_LEN} | changes))


def _answers(runner: DeviceRunner, options: LoopOptions, *, swap: bool = False) -> list[tuple[int, ...]]:
    from tests.parity.engine_runs import answer, answer_preempted, requests_of

    requests = requests_of(prompts(), [SamplingParams(temperature=0.0)], max_tokens=MAX_TOKENS)
    if swap:
        # Twice, not in every step: what has just come back needs steps to end.
        answers = answer_preempted(runner, requests, options, PreemptionMode.SWAP, lambda step: step in (6, 14))
    else:
        answers = answer(runner, requests, options)
    return [tuple(row) for row in answers.tokens]


def _modes(runner: DeviceRunner) -> Iterator[tuple[str, LoopOptions, bool]]:
    yield "as the product runs", _options(), False
    yield "prompts in chunks of 37", _options(max_num_batched_tokens=64, max_prefill_chunk=37), False
    yield "without shared attention", _options(enable_shared_attention=False), False
    if RUN_AHEAD.can_compare:
        yield RUN_AHEAD.without, _options(**RUN_AHEAD.off), False
    if isinstance(runner, Swaps) and runner.host.num_pages:
        yield "swapped out and in", _options(), True


def _schedules(notebook: Notebook, runner: DeviceRunner, subject: Subject, judge: Judge) -> list[tuple[int, ...]]:
    base: list[tuple[int, ...]] = []
    for name, options, swap in _modes(runner):
        tokens = _answers(runner, options, swap=swap)
        base = base or tokens
        _judge(notebook, judge, subject, name, tokens, base)
    return base


def _judge(
    notebook: Notebook,
    judge: Judge,
    subject: Subject,
    mode: str,
    tokens: list[tuple[int, ...]],
    base: list[tuple[int, ...]],
) -> None:
    comparison = judge.compare(prompts(), tokens)
    ties = len(comparison.near_ties)
    same = sum(a == b for a, b in zip(tokens, base, strict=True))
    expected = [len(row) for row in tokens] == [MAX_TOKENS] * len(tokens)
    failures = "; ".join(map(str, comparison.failures[:2]))
    notebook.check(
        f"{subject}, {mode}: transformers' tokens",
        expected and not comparison.failures and (subject.dtype != "float32" or ties == 0),
        f"{comparison.num_rows - ties - len(comparison.failures)} of {comparison.num_rows} equal, {ties} near ties, "
        f"{same} of {len(base)} rows as in the first run{f'; {failures}' if failures else ''}",
    )
    if subject.dtype == "float32":
        notebook.check(f"{subject}, {mode}: the same tokens in every mode", same == len(base))


def _logits(notebook: Notebook, runner: DeviceRunner, subject: Subject, judge: Judge) -> None:
    """At every position, prompts in chunks, several sequences in a step."""
    from tests.parity.paged_driver import PagedDriver

    errors, floors = [], []
    driver = PagedDriver(runner)
    texts = [prompts()[1][:40], prompts()[2][:1], prompts()[4][:16], (*prompts()[6], *prompts()[5])[:230]]
    for chunk in (1 << 30, 33):
        sequences = [driver.add(text) for text in texts]
        found: list[list[torch.Tensor]] = [[] for _ in sequences]
        while rows := [i for i, s in enumerate(sequences) if s.num_computed < len(s.tokens)]:
            work = [(sequences[i], min(chunk, len(sequences[i].tokens) - sequences[i].num_computed)) for i in rows]
            logits = runner.compute_logits(driver.plan(work, every_token=True))
            for i, part in zip(rows, logits.split([count for _, count in work]), strict=True):
                found[i].append(part.float())
        for sequence, parts in zip(sequences, found, strict=True):
            expected = judge.logits(sequence.tokens)
            errors.append(_error(torch.cat(parts), expected))
            if subject.dtype != "float32":
                floors.append(_error(judge.rounded_logits(sequence.tokens), expected))
            driver.release(sequence)
    limit = BF16_LOGITS * max(floors) if floors else FP32_LOGITS
    notebook.check(
        f"{subject}: logits at every position",
        all(error < limit for error in errors),
        f"error {max(errors):.2e}, {f'transformers itself {max(floors):.2e}, ' if floors else ''}limit {limit:.2e}",
    )


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; nan stays nan, and passes no limit."""
    a, b = found.cpu().double(), expected.cpu().double()
    return float((a - b).norm() / b.norm())


def _swap_restores_every_bit(notebook: Notebook, runner: DeviceRunner, subject: Subject) -> None:
    """The same decode from the same pages and from pages that were on the host in between: equal bits in its logits."""
    from tests.parity.paged_driver import PagedDriver

    if not isinstance(runner, Swaps) or not runner.host.num_pages:
        notebook.note(f"{subject}: this runner does not swap")
        return
    driver = PagedDriver(runner, seed=4)
    sequences = [driver.add(text) for text in (prompts()[0], prompts()[3])]
    runner.run(driver.plan([(s, len(s.tokens) - 1) for s in sequences]))
    step = driver.plan([(s, 1) for s in sequences])
    before = runner.compute_logits(step).clone()
    pages = np.array([page for s in sequences for page in s.pages], np.int32)
    places = np.arange(len(pages), dtype=np.int32)
    runner.swap_out(pages, places)
    other = np.array([driver._free.pop() for _ in pages], np.int32)
    runner.swap_in(places, other)
    # Whoever has the old pages now writes to them.
    noise = [driver.add(prompts()[5]) for _ in range(3)]
    driver._free.extend(pages.tolist())
    runner.run(driver.plan([(s, len(s.tokens)) for s in noise]))
    moved = dict(zip(pages.tolist(), other.tolist(), strict=True)) | {0: 0}
    tables = np.vectorize(moved.__getitem__)(step.page_tables).astype(np.int32)
    size = runner.pool.page_size
    slots = np.array([moved[int(slot) // size] * size + int(slot) % size for slot in step.slots], np.int64)
    after = runner.compute_logits(replace(step, page_tables=tables, slots=slots))
    notebook.check(
        f"{subject}: a swap restores every bit",
        bool(torch.equal(before, after)) and bool(before.isfinite().all()),
        f"{len(pages)} pages out, and in at other places",
    )
