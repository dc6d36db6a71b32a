"""Which tokens of a step are drawn after: of the last layer, only they need attention and what follows it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nightmill_worker.engine.step import PrefixGroups, StepPlan


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The R drawn tokens of a step of T tokens in S sequences: of each sequence its last one, or all of its tokens."""

    index: NDArray[np.int32]  # [R] into the T tokens, ascending
    starts: NDArray[np.int32]  # [S + 1] sequence s has drawn tokens index[starts[s]:starts[s+1]]
    groups_draw: bool  # every member of a prefix group draws


def draws_every_token(plan: StepPlan) -> bool:
    """A token is drawn after each, in order, as in steps that only decode."""
    index = plan.sample.token_index
    return len(index) == plan.num_tokens and bool((index == np.arange(plan.num_tokens, dtype=np.int32)).all())


def find_drawn(plan: StepPlan) -> DrawnTokens | None:
    """None: they are not each sequence's last tokens in the order of the sequences (scoring, tests)."""
    index, starts = plan.sample.token_index, plan.query_starts
    if draws_every_token(plan):
        return DrawnTokens(index, starts, True)
    sequence = plan.sample.sequence
    if (np.diff(sequence) < 1).any() or (starts[sequence + 1] != index + 1).any():
        return None
    counts = np.zeros(len(starts), np.int32)
    counts[sequence + 1] = 1
    return DrawnTokens(index, np.cumsum(counts, dtype=np.int32), _all_draw(counts[1:], plan.groups))


def _all_draw(counts: NDArray[np.int32], groups: PrefixGroups | None) -> bool:
    return groups is None or bool(counts[groups.sequences].all())
