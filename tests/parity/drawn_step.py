"""The comparator's reference for a drawn token: which other tokens rounding could have led to.

A draw is an argmax of logit / temperature + noise over what the filters leave, and the noise is known exactly. So a
token is a near tie when logits that are wrong by at most the allowed gap make it the winner: it passes the filters,
give or take the gap, and none that passes them by more than the gap beats it by more.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tests.unit.model.reference_sampler import Row, adjusted

from nightmill_kernels.reference.philox import gumbel_row
from nightmill_worker.bench.comparator import BF16_GAP, FP32_GAP, ReferenceStep
from nightmill_worker.engine.request import Request

Values = NDArray[np.float64]


@dataclass(frozen=True)
class DrawnStep(ReferenceStep):
    """One draw along a row's answer. `candidates` stays empty: they are worked out when they are asked for."""

    logits: NDArray[np.float32]  # [V], as the model gave them
    row: Row
    dtype: str

    def gap_to(self, token: int) -> float:
        """In units of logits; inf when no allowed error of the logits makes this token pass the filters."""
        temperature = 1.0 if self.row.temperature < 1e-5 else self.row.temperature
        allowed = FP32_GAP if self.dtype == "float32" else BF16_GAP * self.max_abs_logit
        values = adjusted(self.logits.astype(np.float64), self.row) / temperature
        if not _survives(values, self.row, allowed / temperature)[token]:
            return float("inf")
        perturbed = values + self._noise() if self.row.temperature >= 1e-5 else values
        certain = _survives(values, self.row, -allowed / temperature)
        certain[values.argmax()] = True
        return max(0.0, float(perturbed[certain].max() - perturbed[token]) * temperature)

    def _noise(self) -> Values:
        seed = self.row.seed - 2**64 if self.row.seed >= 2**63 else self.row.seed
        noise: Values = gumbel_row(torch.tensor([seed]), torch.tensor([self.row.position]), len(self.logits))[0].numpy()
        return noise.astype(np.float64)


def _survives(values: Values, row: Row, slack: float) -> NDArray[np.bool_]:
    """Whether each token passes the filters when logits may be wrong by `slack` in its favour; negative: against it."""
    kept = np.ones(len(values), np.bool_)
    if row.temperature < 1e-5:
        return kept
    if 0 < row.top_k < len(values):
        kept &= values >= np.partition(values, -row.top_k)[-row.top_k] - 2 * slack
    if row.min_p > 0:
        kept &= values >= values.max() + np.log(row.min_p) - 2 * slack
    if row.top_p < 1:
        mass = np.where(kept, np.exp(values - values.max()), 0.0)
        order = np.argsort(-values, kind="stable")
        above = np.empty(len(values))
        above[order] = np.concatenate(([0.0], np.cumsum(mass[order])[:-1])) / mass.sum()
        kept &= above < row.top_p * np.exp(2 * slack)
    return kept


def drawn_steps(request: Request, generated: list[int], logits: NDArray[np.float32], dtype: str) -> list[ReferenceStep]:
    """Steps along `generated`, which another engine is judged against; logits [n, V] are the reference's."""
    s, prompt = request.sampling, request.prompt
    return [
        DrawnStep(
            token=token,
            candidates={},
            max_abs_logit=float(np.abs(line).max()),
            logits=line,
            row=Row(
                temperature=s.temperature,
                top_k=s.top_k,
                top_p=s.top_p,
                min_p=s.min_p,
                presence=s.presence_penalty,
                frequency=s.frequency_penalty,
                repetition=s.repetition_penalty,
                seed=request.seed,
                position=len(prompt) + i,
                history=(*prompt, *generated[:i]),
                prompt_length=len(prompt),
            ),
            dtype=dtype,
        )
        for i, (token, line) in enumerate(zip(generated, logits, strict=True))
    ]
