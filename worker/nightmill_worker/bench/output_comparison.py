"""Whether two outputs of one job agree: every column exactly, the completions up to near ties of the logits.

transformers, teacher-forced with the first output's tokens, says how far apart the two choices were at the first token
that differs (see comparator.py). The tokens are those of the `logprobs` column where the job asked for it
(`--logprobs 0`); else the completion is tokenised again, which is nearly always the same.

transformers computes in float32, whatever the outputs' dtype: in bfloat16 its own rounding would be a third error
beside the two that are compared, and its logits near 20 lie 0.125 apart.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import torch

from nightmill.errors import ValidationError
from nightmill.job_file import read_job_file
from nightmill.reader import read_shard
from nightmill.records import JobSpec, ShardRange, SourceFile
from nightmill.rows import InputRow, parse_rows
from nightmill.states import Tier
from nightmill.storage import LocalStorage
from nightmill_worker.bench.comparator import Comparison, ReferenceStep, compare_greedy
from nightmill_worker.feed.requests import RequestMaker, RowRequest
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.dtype import resolve_dtype
from nightmill_worker.model.source import resolve_model

_TEXT = ("completion", "finish_reason", "completion_tokens")
# How a row came to its answer may differ between two correct runs; what the answer is may not.
_HOW = ("cached_tokens", "attempts", "logprobs")
_CANDIDATES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputComparison:
    """The verdict over two output folders."""

    num_rows: int
    differing_columns: tuple[str, ...]  # other than completions: must be empty
    completions: Comparison


def compare_outputs(first: Path, second: Path) -> OutputComparison:
    """Compare two finished output folders of the same greedy job.

    Raises:
        ValidationError: a folder is no output of ours, or the two have different rows.
    """
    job = read_job_file(LocalStorage(), str(first.resolve()))
    if job is None:
        raise ValidationError(f"{first} is not an output folder: it has no _nightmill/job.json")
    a, b = _read(first), _read(second)
    if a.num_rows != b.num_rows or a.schema != b.schema:
        raise ValidationError(f"{first} and {second} differ in rows or schema")
    columns = [name for name in a.column_names if name not in (*_TEXT, *_HOW)]
    differing = tuple(name for name in columns if not a[name].equals(b[name]))
    return OutputComparison(
        num_rows=a.num_rows, differing_columns=differing, completions=_judge(job.spec, job.sources, a, b)
    )


def _read(folder: Path) -> pa.Table:
    return ds.dataset(sorted(folder.glob("part-*.parquet")), format="parquet").to_table()


def _judge(spec: JobSpec, sources: tuple[SourceFile, ...], a: pa.Table, b: pa.Table) -> Comparison:
    first, second = _answers(spec, a), _answers(spec, b)
    differing = {i for i in range(a.num_rows) if first[i] != second[i]}
    if not differing:
        return Comparison(num_rows=a.num_rows, near_ties=(), failures=())
    oracle = _oracle(spec)
    reference, actual, places = [], [], []
    for place, row in _rows_at(spec, sources, differing):
        reference.append(oracle.steps(row, oracle.tokens(first[place])))
        actual.append(oracle.tokens(second[place]))
        places.append(place)
    verdict = compare_greedy(reference, actual, dtype=oracle.dtype)
    ties, failures = ([replace(d, row=places[d.row]) for d in found] for found in (verdict.near_ties, verdict.failures))
    return Comparison(num_rows=a.num_rows, near_ties=tuple(ties), failures=tuple(failures))


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str | None
    finish_reason: str | None
    tokens: tuple[int, ...] | None  # None: not known


def _answers(spec: JobSpec, table: pa.Table) -> list[_Answer]:
    texts, reasons = table[spec.output_column].to_pylist(), table["finish_reason"].to_pylist()
    given = table["logprobs"].to_pylist() if "logprobs" in table.column_names else [None] * table.num_rows
    return [
        _Answer(
            text, reason, None if line is None else tuple(token["token_id"] for token in json.loads(line)["content"])
        )
        for text, reason, line in zip(texts, reasons, given, strict=True)
    ]


def _rows_at(spec: JobSpec, sources: tuple[SourceFile, ...], wanted: set[int]) -> Iterator[tuple[int, InputRow]]:
    """Input rows with their place in the whole output: sources follow each other in plan order."""
    start = 0
    for source in sources:
        whole = ShardRange(index=0, source_file=source.uri, row_start=0, row_end=source.num_rows)
        for batch in read_shard(whole, spec):
            for row in parse_rows(batch, spec):
                if isinstance(row, InputRow) and start + row.row_index in wanted:
                    yield start + row.row_index, row
        start += source.num_rows


class _Oracle:
    """transformers, asked for its logits along a given answer."""

    def __init__(self, spec: JobSpec) -> None:
        from transformers import AutoModelForCausalLM

        resolved = resolve_model(spec.model)
        config = ModelConfig.from_directory(resolved.directory)
        self.dtype = resolve_dtype(spec.model.dtype, config)
        self._tokenizer = Tokenizer.load(resolved.directory)
        self._maker = RequestMaker(
            self._tokenizer,
            spec,
            job_id="comparison",
            tier=Tier.NORMAL,
            max_model_len=config.resolve_max_model_len(spec.model.max_model_len),
        )
        self._model: Any = AutoModelForCausalLM.from_pretrained(resolved.directory, dtype=torch.float32)

    def tokens(self, answer: _Answer) -> list[int]:
        """The answer's tokens, EOS included where it stopped."""
        if answer.tokens is not None:
            return list(answer.tokens)
        ids = self._tokenizer.encode(answer.text or "", add_special_tokens=False)
        return ids + [self._tokenizer.eos_token_ids[0]] * (answer.finish_reason == "stop")

    @torch.inference_mode()
    def steps(self, row: InputRow, answer: list[int]) -> list[ReferenceStep]:
        """The first output's choice at each position, with the reference's candidates there."""
        (made,) = self._maker.make([row])
        if not isinstance(made, RowRequest):
            raise ValidationError(f"row {row.row_index} has completions in both outputs but cannot be run: {made}")
        ids = torch.tensor([[*made.request.prompt, *answer[:-1]]])
        logits = self._model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
        best = logits.topk(_CANDIDATES)
        steps: list[ReferenceStep] = []
        for i, token in enumerate(answer):
            candidates = dict(zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True))
            candidates.setdefault(token, float(logits[i, token]))
            steps.append(_Step(token, candidates, float(logits[i].abs().max())))
        return steps


_oracle = lru_cache(maxsize=1)(_Oracle)  # several outputs are compared with one


class _Step(ReferenceStep):
    """Either of the two outputs may be the one below: the distance counts, not its sign."""

    def gap_to(self, token: int) -> float:
        return abs(self.candidates[self.token] - self.candidates.get(token, float("-inf")))
