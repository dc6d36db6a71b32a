"""A StepPlan's arrays as the tensors that the layers take, on a CPU: the same memory."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightmill_kernels.metadata import AttentionMetadata, PrefixGroups
from nightmill_worker.engine import step
from nightmill_worker.engine.step import StepPlan
from nightmill_worker.model.drawn_tokens import DrawnTokens, draws_every_token, find_drawn
from nightmill_worker.model.layers import StepTensors
from nightmill_worker.model.workspace import ANYWHERE, LayerBuffers


def step_tensors(plan: StepPlan, buffers: LayerBuffers = ANYWHERE) -> StepTensors:
    """The plan's tensors, and where the layers put their results."""
    is_every = draws_every_token(plan)
    drawn = None if is_every else find_drawn(plan)
    return StepTensors(
        token_ids=share(plan.token_ids),
        positions=share(plan.positions),
        slots=share(plan.slots),
        attention=_attention(plan, plan.query_starts, plan.groups),
        sampled=None if is_every else share(plan.sample.token_index),
        drawn=None if drawn is None else drawn_attention(plan, drawn),
        buffers=buffers,
    )


def drawn_attention(plan: StepPlan, drawn: DrawnTokens) -> AttentionMetadata:
    """Attention of the drawn tokens alone."""
    return _attention(plan, drawn.starts, plan.groups if drawn.groups_draw else None)


def _attention(plan: StepPlan, starts: NDArray[np.int32], groups: step.PrefixGroups | None) -> AttentionMetadata:
    return AttentionMetadata(
        query_starts=share(starts),
        context_lens=share(plan.context_lens),
        page_tables=share(plan.page_tables),
        max_query_len=int(np.diff(starts).max(initial=0)),
        groups=None
        if groups is None
        else PrefixGroups(
            starts=share(groups.starts), sequences=share(groups.sequences), num_pages=share(groups.num_pages)
        ),
    )


def share(array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
    """The array as a tensor, to be read only."""
    # Read-only arrays make torch warn; nothing here writes to them.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
