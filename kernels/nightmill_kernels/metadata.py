"""Where each sequence's tokens and pages are: what one step tells every attention layer."""

from dataclasses import dataclass

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

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.context_lens.shape[0]
