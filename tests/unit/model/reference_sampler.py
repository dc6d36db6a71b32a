"""Philox and the sampler written a second time, in plain Python and numpy: what the fast ones are tested against."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nightmill_worker.engine.step import SampleBatch


def philox_4x32_10(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """One block, from the paper's definition."""
    c = list(counter)
    k = list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c[0], c[1], c[2], c[3]


def gumbel(seed: int, position: int, token: int) -> float:
    counter = (token // 4, position % (1 << 32), position >> 32, 0)
    word = philox_4x32_10(counter, (seed % (1 << 32), seed >> 32))[token % 4]
    return -math.log(-math.log1p(-min((word + 0.5) * 2.0**-32, 1 - 2.0**-24)))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row's parameters; the defaults draw from the plain distribution."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    position: int = 5
    num_logprobs: int = -1
    history: tuple[int, ...] = ()
    prompt_length: int = 0
    banned: tuple[int, ...] = ()


def batch_of(rows: Sequence[Row]) -> SampleBatch:
    def array(name: str, dtype: type) -> NDArray:  # type: ignore[type-arg]
        return np.array([getattr(row, name) for row in rows], dtype=dtype)

    return SampleBatch(
        sequence=np.arange(len(rows), dtype=np.int32),
        token_index=np.arange(len(rows), dtype=np.int32),
        position=array("position", np.int64),
        seed=array("seed", np.uint64),
        temperature=array("temperature", np.float32),
        top_k=array("top_k", np.int32),
        top_p=array("top_p", np.float32),
        min_p=array("min_p", np.float32),
        presence_penalty=array("presence", np.float32),
        frequency_penalty=array("frequency", np.float32),
        repetition_penalty=array("repetition", np.float32),
        num_logprobs=array("num_logprobs", np.int32),
        any_random=any(row.temperature >= 1e-5 for row in rows),
        history={
            i: (np.array(row.history, np.int32), row.prompt_length)
            for i, row in enumerate(rows)
            if row.presence or row.frequency or row.repetition != 1.0
        },
        banned={i: np.array(row.banned, np.int32) for i, row in enumerate(rows) if row.banned},
    )


def adjusted(logits: NDArray[np.float64], row: Row) -> NDArray[np.float64]:
    """Bans and penalties."""
    line = logits.copy()
    line[list(row.banned)] = -np.inf
    for token in set(row.history):
        line[token] = line[token] / row.repetition if line[token] > 0 else line[token] * row.repetition
    completion = row.history[row.prompt_length :]
    for token in set(completion):
        line[token] -= row.frequency * completion.count(token) + row.presence
    return line


def survivors(line: NDArray[np.float64], row: Row) -> set[int]:
    """Ids that the filters leave, by a full sort."""
    alive = {i for i in range(len(line)) if line[i] > -np.inf}
    top = max(line)
    if row.min_p > 0:
        alive = {i for i in alive if line[i] >= top + math.log(row.min_p)}
    if 0 < row.top_k < len(line):
        kth = sorted(line, reverse=True)[row.top_k - 1]
        alive = {i for i in alive if line[i] >= kth}
    if row.top_p < 1:
        total = sum(math.exp(line[i] - top) for i in alive)
        ordered = sorted(alive, key=lambda i: -line[i])
        mass, last = 0.0, ordered[0]
        for i in ordered:
            if mass / total >= row.top_p and i != ordered[0]:
                break
            mass += math.exp(line[i] - top)
            last = i
        alive = {i for i in alive if line[i] >= line[last]}
    return alive


def draw(logits: NDArray[np.float64], row: Row) -> int:
    line = adjusted(logits, row)
    if row.temperature < 1e-5:
        return int(line.argmax())
    line = line / row.temperature
    return max(sorted(survivors(line, row)), key=lambda i: line[i] + gumbel(row.seed, row.position, i))
