"""The host pool's memory: pages of preempted sequences, and the copies out and in."""

import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from nightmill_kernels.cpu.huge_pages import zeroed_on_touch
from nightmill_kernels.gather_pages import gather_pages, scatter_pages
from nightmill_worker.engine.step import HostShape
from nightmill_worker.model.pool import KVPool

_MAX_COPY_BYTES = 16 << 20
"""Of one gather or scatter: bounds what it needs besides the two pools."""

PageIds = NDArray[np.int32]


class HostPages:
    """Pages [num_pages, 2 · layers, kv_heads, page_size, head_dim] on the host, each in one piece; for a CPU pool.

    Here "device" and "host" are the same memory, so a gather writes straight into the host page. A GPU needs staging
    in between: see docs/adr/0002-preemption.md.
    """

    def __init__(self, pool: KVPool, num_pages: int) -> None:
        self._pool = pool.planes
        planes, _, *page = self._pool.shape
        self._page_bytes = pool.shape.page_size * pool.shape.bytes_per_token
        self._host = (
            zeroed_on_touch((num_pages, planes, *page), self._pool.dtype)
            if num_pages
            else torch.empty((0, planes, *page), dtype=self._pool.dtype)
        )
        self._max_copy = max(1, _MAX_COPY_BYTES // self._page_bytes)
        self.shape = HostShape(num_pages=num_pages, bytes_per_s=self._measure(pool) if num_pages else 1.0)

    def swap_out(self, pages: PageIds, host_pages: PageIds) -> None:
        """Copy page `pages[i]` of the pool to `host_pages[i]`."""
        ids = torch.from_numpy(pages.astype(np.int64))
        for start, end in self._runs(host_pages):
            first = int(host_pages[start])
            gather_pages(self._pool, ids[start:end], self._host[first : first + end - start])

    def swap_in(self, host_pages: PageIds, pages: PageIds) -> None:
        """Copy `host_pages[i]` to page `pages[i]` of the pool."""
        ids = torch.from_numpy(pages.astype(np.int64))
        for start, end in self._runs(host_pages):
            first = int(host_pages[start])
            scatter_pages(self._host[first : first + end - start], ids[start:end], self._pool)

    def _runs(self, host_pages: PageIds) -> Iterator[tuple[int, int]]:
        """Pieces of consecutive host pages, [start, end), short enough for one copy."""
        start = 0
        for end in range(1, len(host_pages) + 1):
            is_last = end == len(host_pages) or host_pages[end] != host_pages[end - 1] + 1
            if is_last or end - start == self._max_copy:
                yield start, end
                start = end

    @torch.inference_mode()
    def _measure(self, pool: KVPool) -> float:
        """Bytes per second, the better of two rounds: the first one pays for memory that was never touched.

        Copies the null page and its neighbours onto themselves: nothing has been written yet, and nothing changes.
        """
        count = min(self._max_copy, len(self._host), pool.shape.num_pages)
        pages = np.arange(count, dtype=np.int32)
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            self.swap_out(pages, pages)
            self.swap_in(pages, pages)
            seconds.append(time.perf_counter() - started)
        return 2 * count * self._page_bytes / max(min(seconds), 1e-9)
