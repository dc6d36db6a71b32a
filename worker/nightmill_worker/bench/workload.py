"""The benchmark workloads: seeded token ids of real text with exact output lengths.

| name | rows | prompt tokens | output tokens |
|---|---|---|---|
| W1 shared system prompt | 256 | 384 shared + 16–96 own | 8–64 |
| W2 long tail | 128 | 16–256, nothing shared | lognormal, 4–512 |
| W3 summarise | 48 | 1,024 own | 48 |

W0 is a small warm-up over other text. Every engine gets the same ids and must return exactly `max_tokens` tokens.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nightmill_worker.bench.corpus import corpus_texts

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]

NAMES = ("W0", "W1", "W2", "W3")
REFERENCE_SHA256 = {"W1": "7c268bdde3b0ec6a", "W2": "c414fef06ff76f20", "W3": "248217dfd7b80df9"}
"""First 16 hex digits for SmolLM2's tokenizer on CPython 3.11; other text or another tokenizer gives other rows."""

_SEED = 20261129
_WARM_UP_SEED = 7


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One request: the answer is exactly `max_tokens` long (EOS is ignored)."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    shared_prefix: int  # leading tokens common to all rows of the workload


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of rows with the hash of its canonical file."""

    name: str
    rows: tuple[WorkloadRow, ...]
    sha256: str

    @property
    def prompt_tokens(self) -> int:
        """Tokens in, over all rows."""
        return sum(len(row.prompt_ids) for row in self.rows)

    @property
    def output_tokens(self) -> int:
        """Tokens out, over all rows."""
        return sum(row.max_tokens for row in self.rows)

    @property
    def is_reference(self) -> bool:
        """True when published figures for this workload are comparable."""
        return self.sha256.startswith(REFERENCE_SHA256.get(self.name, "-"))


def make_workloads(encode: Encode, decode: Decode) -> dict[str, Workload]:
    """All workloads. They come from one random stream, so they are drawn together and in order."""
    corpus = corpus_ids(encode)
    rng = random.Random(_SEED)
    system = _span(corpus, rng, 384)
    rows: dict[str, list[WorkloadRow]] = {}
    rows["W1"] = shared_prompt_rows(corpus, rng, system, 256)
    rows["W2"] = [WorkloadRow(_span(corpus, rng, rng.randint(16, 256)), _long_tail(rng), 0) for _ in range(128)]
    rows["W3"] = [WorkloadRow(_span(corpus, rng, 1024), 48, 0) for _ in range(48)]
    warm_up = random.Random(_WARM_UP_SEED)
    rows["W0"] = [
        WorkloadRow(_span(corpus, warm_up, warm_up.randint(64, 512)), warm_up.randint(8, 32), 0) for _ in range(32)
    ]
    return {name: Workload(name, tuple(rows[name]), _sha256(name, rows[name], decode)) for name in NAMES}


def shared_prompt_rows(
    corpus: tuple[int, ...], rng: random.Random, system: tuple[int, ...], count: int
) -> list[WorkloadRow]:
    """`count` rows of W1's shape, all behind the same tokens."""
    # The order of the draws inside a row (length, place, output) is part of the workload's definition.
    return [
        WorkloadRow(system + _span(corpus, rng, rng.randint(16, 96)), rng.randint(8, 64), len(system))
        for _ in range(count)
    ]


def corpus_ids(encode: Encode) -> tuple[int, ...]:
    """The corpus as one run of tokens."""
    separator = tuple(encode("\n\n"))
    ids: list[int] = []
    for text in corpus_texts():
        ids += encode(text)
        ids += separator
    return tuple(ids)


def canonical_lines(name: str, rows: Sequence[WorkloadRow], decode: Decode) -> list[str]:
    """The workload as JSON lines, the form other engines' runners read."""
    return [
        json.dumps(
            {
                "id": f"{name}-{i}",
                "prompt_ids": list(row.prompt_ids),
                "prompt": decode(row.prompt_ids),
                "max_tokens": row.max_tokens,
                "ignore_eos": True,
                "shared_prefix": row.shared_prefix,
            }
        )
        for i, row in enumerate(rows)
    ]


def _sha256(name: str, rows: Sequence[WorkloadRow], decode: Decode) -> str:
    digest = hashlib.sha256()
    for line in canonical_lines(name, rows, decode):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _span(corpus: tuple[int, ...], rng: random.Random, length: int) -> tuple[int, ...]:
    start = rng.randrange(len(corpus) - length)
    return corpus[start : start + length]


def _long_tail(rng: random.Random) -> int:
    return max(4, min(512, round(rng.lognormvariate(math.log(62), 1.0))))
