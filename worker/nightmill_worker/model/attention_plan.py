"""The work lists of a step's attention, one for each width of window that the model's layers have."""

from collections.abc import Mapping

import torch
from torch import Tensor

from nightmill_kernels.backend import on_triton
from nightmill_kernels.metadata import AttentionWork
from nightmill_kernels.work_list import WorkCapacity, WorkList, decode_capacity, plan_attention
from nightmill_worker.engine.step import StepPlan
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.device import Device
from nightmill_worker.model.staging import StagingBuffer

WorkLists = dict[int | None, WorkList]


class AttentionPlanner:
    """Plans lists and owns the scratch memory that attention needs, which all layers use in turn."""

    def __init__(
        self, config: ModelConfig, device: Device, dtype: torch.dtype, *, page_size: int, max_seqs: int, max_len: int
    ) -> None:
        self.windows = tuple(dict.fromkeys(layer.window for layer in config.layers))
        self._group_size = config.num_heads // config.num_kv_heads
        self._page_size = page_size
        self._max_len = max_len
        self._kv_heads = config.num_kv_heads
        partials = max(self.capacity(max_seqs, window, grouped=True).partials for window in self.windows)
        shape = (partials, config.num_heads)
        self._partial_lse = torch.zeros(shape, dtype=torch.float32, device=device.torch_device)
        self._partial_out = torch.zeros((*shape, config.head_dim), dtype=torch.float32, device=device.torch_device)
        self._programs = {
            wide: _programs(device, self._partial_lse, config.head_dim, dtype.itemsize, wide) for wide in (False, True)
        }

    @property
    def scratch_bytes(self) -> int:
        """Of the device's memory."""
        return self._partial_lse.nbytes + self._partial_out.nbytes

    def capacity(self, num_tokens: int, window: int | None, *, grouped: bool) -> WorkCapacity:
        """What the lists of any decodes of so many tokens fit into."""
        return decode_capacity(num_tokens, self._max_len, window, grouped=grouped)

    def graph_bytes(self, num_tokens: int) -> int:
        """Of staging, for the lists of a recorded step."""
        capacities = [self.capacity(num_tokens, window, grouped=True) for window in self.windows]
        return sum(4 * (8 + 8 * c.items + 4 * c.rows + 4 * c.merges) + 64 for c in capacities)

    def plan(self, step: StepPlan, *, num_tokens: int, table_width: int) -> WorkLists:
        """The lists of a step; tokens past its own, up to `num_tokens`, are padding."""
        return {
            window: plan_attention(
                step.query_starts,
                step.context_lens,
                step.groups,
                num_tokens=num_tokens,
                group_size=self._group_size,
                page_size=self._page_size,
                table_width=table_width,
                window=window,
            )
            for window in self.windows
        }

    def put(self, lists: WorkLists, staging: StagingBuffer) -> Mapping[int | None, AttentionWork]:
        """Lists on their way to the device, as long as they are."""
        return {
            window: self._work(
                work,
                staging.put(work.header),
                staging.put(work.items),
                staging.put(work.rows),
                staging.put(work.merges),
                has_wide=work.has_wide,
                # One piece a program: tiles differ in length, and the hardware hands them out as programs end.
                num_programs=work.num_items * self._kv_heads,
            )
            for window, work in lists.items()
        }

    def put_decodes(
        self, lists: WorkLists, staging: StagingBuffer, *, num_tokens: int, grouped: bool
    ) -> Mapping[int | None, AttentionWork]:
        """Lists of decodes at places that depend on `num_tokens` and `grouped` alone: for a graph."""
        works = {}
        for window, work in lists.items():
            room = self.capacity(num_tokens, window, grouped=grouped)
            works[window] = self._work(
                work,
                staging.put(work.header),
                staging.put(work.items, room=room.items, fill=None),
                staging.put(work.rows, room=room.rows, fill=None),
                staging.put(work.merges, room=room.merges, fill=None),
                has_wide=grouped and window is None,
                num_programs=self._programs[grouped and window is None],
            )
        return works

    def _work(
        self,
        work: WorkList,
        header: Tensor,
        items: Tensor,
        rows: Tensor,
        merges: Tensor,
        *,
        has_wide: bool,
        num_programs: int,
    ) -> AttentionWork:
        if work.num_partials > len(self._partial_lse):
            raise ValueError(
                f"{work.num_partials} partials of attention do not fit scratch for {len(self._partial_lse)}"
            )
        return AttentionWork(
            header=header,
            items=items,
            rows=rows,
            merges=merges,
            partial_out=self._partial_out,
            partial_lse=self._partial_lse,
            has_wide=has_wide,
            num_programs=num_programs,
        )


def _programs(device: Device, tensor: Tensor, head_dim: int, itemsize: int, has_wide: bool) -> int:
    if not on_triton(tensor):
        return 1  # nobody asks: triton may not even be installed
    from nightmill_kernels.gpu import device_limits
    from nightmill_kernels.gpu.attention_config import num_programs

    return num_programs(
        head_dim=head_dim,
        itemsize=itemsize,
        has_wide=has_wide,
        num_sms=device.num_sms,
        shared_limit=device_limits.shared_limit(tensor.device),
    )
