"""The host pool of a device with memory of its own: copies out and in that steps do not wait for."""

import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from nightmill_kernels.gather_pages import gather_pages, scatter_pages
from nightmill_worker.engine.step import HostShape
from nightmill_worker.model.device import Device
from nightmill_worker.model.pool import KVPool
from nightmill_worker.model.staging import StagingBuffer

_MAX_COPY_BYTES = 64 << 20
"""Of one gather or scatter, and of each staging buffer: some ms of a PCIe 5 link."""
_NUM_BUFFERS = 2

PageIds = NDArray[np.int32]


class DeviceHostPages:
    """Pages [num_pages, 2 · layers, kv_heads, page_size, head_dim] in host memory, each in one piece.

        out   pool ──gather──▶ buffer ──copy beside the steps──▶ host pages
        in    pool ◀──scatter── buffer ◀──copy beside the steps── host pages

    What touches the pool stands in line with the steps, so that a page may be given to anyone as soon as a call has
    returned. The copies stand in a line of their own, so that they come one after the other. Two buffers take turns;
    each has a mark for what used it last. See docs/adr/0002-preemption.md.
    """

    def __init__(self, pool: KVPool, num_pages: int, device: Device) -> None:
        self._device = device
        self._pool = pool.planes
        planes, _, *page = self._pool.shape
        self._page_bytes = pool.shape.page_size * pool.shape.bytes_per_token
        self._max_copy = max(1, min(num_pages, _MAX_COPY_BYTES // self._page_bytes))
        dtype, where = self._pool.dtype, device.torch_device
        self._host = device.host_tensor((num_pages, planes, *page), dtype)
        size = self._max_copy if num_pages else 0
        self._buffers = [torch.zeros((size, planes, *page), dtype=dtype, device=where) for _ in range(_NUM_BUFFERS)]
        self._last_use = [device.mark() for _ in range(_NUM_BUFFERS)]
        self._handover = [device.mark() for _ in range(_NUM_BUFFERS)]
        self._ids = StagingBuffer(device, 8 * size, num_buffers=4)
        self._turn = 0
        self.shape = HostShape(num_pages=num_pages, bytes_per_s=self._measure(pool) if num_pages else 1.0)

    def swap_out(self, pages: PageIds, host_pages: PageIds) -> None:
        """Copy page `pages[i]` of the pool to `host_pages[i]`."""
        for start in range(0, len(pages), self._max_copy):
            self._copy_out(pages[start : start + self._max_copy], host_pages[start : start + self._max_copy])

    def swap_in(self, host_pages: PageIds, pages: PageIds) -> None:
        """Copy `host_pages[i]` to page `pages[i]` of the pool."""
        for start in range(0, len(pages), self._max_copy):
            self._copy_in(host_pages[start : start + self._max_copy], pages[start : start + self._max_copy])

    def _copy_out(self, pages: PageIds, host_pages: PageIds) -> None:
        turn = self._next_turn()
        staged = self._buffers[turn][: len(pages)]
        ids = self._send(pages)
        self._last_use[turn].hold()
        gather_pages(self._pool, ids, staged)
        self._handover[turn].record()
        with self._device.beside():
            self._handover[turn].hold()
            for start, end in _runs(host_pages):
                first = int(host_pages[start])
                self._device.to_host(self._host[first : first + end - start], staged[start:end])
            self._last_use[turn].record()

    def _copy_in(self, host_pages: PageIds, pages: PageIds) -> None:
        turn = self._next_turn()
        staged = self._buffers[turn][: len(pages)]
        with self._device.beside():
            self._last_use[turn].hold()
            for start, end in _runs(host_pages):
                first = int(host_pages[start])
                self._device.to_device(staged[start:end], self._host[first : first + end - start])
            self._handover[turn].record()
        ids = self._send(pages)
        self._handover[turn].hold()
        scatter_pages(staged, ids, self._pool)
        self._last_use[turn].record()

    def _next_turn(self) -> int:
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        return self._turn

    def _send(self, pages: PageIds) -> torch.Tensor:
        ids = self._ids.put(pages.astype(np.int64))
        self._ids.flush()
        return ids

    @torch.inference_mode()
    def _measure(self, pool: KVPool) -> float:
        """Bytes per second, the better of two rounds: the first one compiles kernels and touches memory.

        Copies the null page and its neighbours onto themselves: nothing has been written yet, and nothing changes.
        """
        count = min(self._max_copy, pool.shape.num_pages)
        pages = np.arange(count, dtype=np.int32)
        done, seconds = self._device.mark(), []
        for _ in range(2):
            started = time.perf_counter()
            self.swap_out(pages, pages)
            self.swap_in(pages, pages)
            done.record()
            done.wait()
            seconds.append(time.perf_counter() - started)
        return 2 * count * self._page_bytes / max(min(seconds), 1e-9)


def _runs(host_pages: PageIds) -> Iterator[tuple[int, int]]:
    """Pieces of consecutive host pages, [start, end): one copy each."""
    cuts = np.flatnonzero(np.diff(host_pages) != 1) + 1
    yield from pairwise([0, *cuts.tolist(), len(host_pages)])
