"""Where each sequence's tokens and pages are: what one step tells every attention layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroups:
    """Sequences whose first pages are the same page ids: attention over those is computed for all of them at once.

    Every sequence named has one query token and stands in one group only.
    """

    starts: Tensor  # int32 [N + 1], ascending from 0; group n owns sequences[starts[n]:starts[n+1]]
    sequences: Tensor  # int32 [M] indices into the step's sequences
    num_pages: Tensor  # int32 [N] page ids from column 0 on that are the same in the group, all of them full


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """A step's attention as a list of equal pieces of work for a GPU, on its device: see `work_list`.

    Counts are in `header`, on the device, so that a CUDA graph can be replayed with other lists of its capacity.
    """

    header: Tensor  # int32 [8]: narrow items, wide items, merges, row length of the page tables; the rest 0
    items: Tensor  # int32 [I, 8] narrow items first
    rows: Tensor  # int32 [R, 4] (token, its position, first partial or -1, 0) of each query row of each item
    merges: Tensor  # int32 [M, 4] (token, first partial, number of partials, 0)
    partial_out: Tensor  # fp32 [P, H, D] scratch
    partial_lse: Tensor  # fp32 [P, H] scratch, base 2
    has_wide: bool  # whether there may be wide items: prefill tiles and shared prefixes
    num_programs: int  # of the attention kernel's grid; each takes every num_programs-th piece


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One step's S sequences over T flat tokens, on the device of the page pool. Build it once a step.

    Query token i of sequence s stands at position `context_lens[s] - query_len + i` and sees the keys up to itself.
    A padding sequence has context length 0; tokens past `query_starts[S]` belong to nobody. Both get zeros.
    """

    query_starts: Tensor  # int32 [S + 1], ascending from 0; sequence s owns tokens query_starts[s]:query_starts[s+1]
    context_lens: Tensor  # int32 [S] tokens visible to the sequence's last token of this step, itself included
    page_tables: Tensor  # int32 [S, P] page ids; columns past ceil(context_len / page_size) are never read
    max_query_len: int  # longest query of the step; 1 = decodes only
    groups: PrefixGroups | None = None  # how to compute, never what: results differ in rounding at most
    work: Mapping[int | None, AttentionWork] = field(
        default_factory=dict
    )  # by window; a GPU call without builds its own

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.context_lens.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRows:
    """How each of R rows of logits draws its token: 1-D tensors, contiguous."""

    temperature: Tensor  # float32, 0 = greedy
    min_p: Tensor  # float32, 0 = all
    top_k: Tensor  # int32, 0 = all
    top_p: Tensor  # float32, 1 = all
    seed: Tensor  # int64: the bits of an unsigned seed
    position: Tensor  # int64: index in the sequence of the token being drawn

    def at(self, index: Tensor) -> "DrawRows":
        """A subset of the rows."""
        return DrawRows(**{field.name: getattr(self, field.name)[index] for field in fields(self)})
