"""A StepPlan on its way to the device: every array in one staging buffer, in an order that graphs can rely on."""

from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nightmill_kernels.backend import on_triton
from nightmill_kernels.metadata import AttentionMetadata
from nightmill_worker.engine.step import StepPlan
from nightmill_worker.model.attention_plan import AttentionPlanner, WorkLists
from nightmill_worker.model.device import Device
from nightmill_worker.model.layers import StepTensors
from nightmill_worker.model.staging import StagingBuffer

_NUM_BUFFERS = 3  # two steps in flight and one that is being staged
_INT32 = np.dtype(np.int32)


class StepInputs:
    """Stages steps. `staging.flush` sends one.

    The buffer on the device:

        | tokens drawn last | token ids | index | positions | slots | … | work lists | page tables | what is put after |
          never staged        of every row of a graph, then what varies in size

    A row whose token only the device knows has an index into the first part, any other an index into the second.
    """

    def __init__(
        self,
        device: Device,
        attention: AttentionPlanner,
        *,
        page_size: int,
        max_seqs: int,
        max_batched_tokens: int,
        max_len: int,
    ) -> None:
        self._attention = attention
        self._table_width = -(-max_len // page_size)
        tables = 4 * max_seqs * self._table_width
        of_tokens = (24 + 24 * len(attention.windows)) * max_batched_tokens  # ids, index, …; rows of the work lists
        num_bytes = of_tokens + 64 * max_seqs + attention.graph_bytes(max_seqs) + tables + (256 << 10)
        self.staging = StagingBuffer(device, num_bytes, num_buffers=_NUM_BUFFERS, head_bytes=4 * max_seqs)
        self.drawn = self.staging.at(0, (max_seqs,), _INT32)  # tokens of the step before
        self._num_ahead = self.staging.offset // _INT32.itemsize  # int32 before the first token id

    def put(self, plan: StepPlan) -> StepTensors:
        """Stage a step of any kind."""
        put = self.staging.put
        token_ids, index = put(plan.token_ids), self._index(plan)
        lists = self._attention.plan(plan, num_tokens=plan.num_tokens, table_width=plan.page_tables.shape[1])
        return StepTensors(
            token_ids=token_ids if index is None else self._known(plan.num_tokens),
            token_index=None if index is None else put(index),
            positions=put(plan.positions),
            slots=put(plan.slots),
            attention=AttentionMetadata(
                query_starts=put(plan.query_starts),
                context_lens=put(plan.context_lens),
                work=self._attention.put(lists, self.staging),
                page_tables=put(plan.page_tables),
                max_query_len=int(np.diff(plan.query_starts).max(initial=0)),
            ),
            sampled=self.put_sampled(plan),
        )

    def lists_of(self, plan: StepPlan, size: int) -> WorkLists:
        """The work lists of a step of decodes, for a graph of `size` rows."""
        width = plan.page_tables.shape[1] if self._is_triton else self._table_width
        return self._attention.plan(plan, num_tokens=size, table_width=width)

    def put_decodes(self, plan: StepPlan, lists: WorkLists, size: int, *, grouped: bool) -> StepTensors:
        """Stage a step of decodes for a graph of `size` rows: the tensors are the same for every such step.

        Rows that the step lacks write no K and V, see nothing, and are token 0.
        """
        put = self.staging.put
        index = self._index(plan)
        if index is None:
            index = self._identity(plan.num_tokens)
        start = partial(put, room=size)
        start(plan.token_ids)
        return StepTensors(
            token_ids=self._known(size),
            token_index=start(index),
            positions=start(plan.positions),
            slots=start(plan.slots, fill=-1),
            attention=AttentionMetadata(
                query_starts=put(plan.query_starts, room=size + 1, fill=plan.num_tokens),
                context_lens=start(plan.context_lens),
                work=self._attention.put_decodes(lists, self.staging, num_tokens=size, grouped=grouped),
                page_tables=self._put_tables(plan.page_tables, size),
                max_query_len=1,
            ),
            sampled=None,
        )

    def put_sampled(self, plan: StepPlan) -> Tensor | None:
        """Which tokens draw; None: all of them, in order."""
        token_index = plan.sample.token_index
        if len(token_index) == plan.num_tokens and bool((token_index == np.arange(plan.num_tokens)).all()):
            return None
        return self.staging.put(token_index.astype(np.int64))

    def _put_tables(self, tables: NDArray[np.int32], size: int) -> Tensor:
        """As wide as can be, in a graph's eyes; its kernel reads how wide they are in the lists' header."""
        offset, shape = self.staging.offset, (size, self._table_width)
        if not self._is_triton:  # the others go by the tensor's shape
            wide = np.zeros(shape, np.int32)
            wide[: len(tables), : tables.shape[1]] = tables
            tables = wide
        self.staging.put(tables)
        return self.staging.at(offset, shape, _INT32)

    @property
    def _is_triton(self) -> bool:
        return on_triton(self.drawn)

    def _known(self, num_tokens: int) -> Tensor:
        """Tokens drawn last, then the staged ids."""
        return self.staging.at(0, (self._num_ahead + num_tokens,), _INT32)

    def _identity(self, num_tokens: int) -> NDArray[np.int32]:
        return np.arange(self._num_ahead, self._num_ahead + num_tokens, dtype=np.int32)

    def _index(self, plan: StepPlan) -> NDArray[np.int32] | None:
        source = plan.token_source
        if source is None:
            return None
        return np.where(source < 0, self._identity(plan.num_tokens), source)
