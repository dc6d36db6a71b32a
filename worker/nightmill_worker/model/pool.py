"""The KV page pool: K and V of every layer, in pages."""

from pathlib import Path

import psutil
import torch
from torch import Tensor

from nightmill.errors import ModelError
from nightmill.records import EngineOptions
from nightmill_kernels.cpu.huge_pages import zeroed_on_touch
from nightmill_worker.engine.step import PoolShape
from nightmill_worker.model.config import ModelConfig

DEFAULT_PAGE_SIZE = 16
# A CPU worker shares its memory with the data it serves; the pool is touched page by page as it fills.
_CPU_POOL_BYTES = 2 << 30
_CPU_POOL_FRACTION = 0.25
_HOST_POOL_DIVISOR = 4
# A GPU's host pool is page-locked: nobody else can have that memory, and locking takes about a second for this much.
_LOCKED_BYTES = 4 << 30
_LOCKED_FRACTION = 0.25


class KVPool:
    """Pages of K and V, [num_pages, kv_heads, page_size, head_dim] per layer, zeroed; page 0 is the null page.

    Zeroed because attention may multiply a page's unused tail by a weight of 0, and 0 · NaN is NaN.
    """

    def __init__(
        self, config: ModelConfig, shape: PoolShape, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.shape = shape
        # One allocation: a page can be moved in a few copies.
        dims = (config.num_layers, 2, shape.num_pages, config.num_kv_heads, shape.page_size, config.head_dim)
        self._pages = (
            zeroed_on_touch(dims, dtype)
            if torch.device(device).type == "cpu"
            else torch.zeros(dims, dtype=dtype, device=device)
        )
        self._layers = [(layer[0], layer[1]) for layer in self._pages]

    @property
    def planes(self) -> Tensor:
        """All pages as [2 · layers, num_pages, kv_heads, page_size, head_dim]: K and V of each layer is a plane."""
        return self._pages.flatten(0, 1)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V pages of one layer."""
        return self._layers[index]


def plan_pool(config: ModelConfig, options: EngineOptions, *, dtype: str, max_model_len: int) -> PoolShape:
    """Size the pool from `pool_bytes`, else from the memory of the machine, and from what sequences can use at most.

    Raises:
        ModelError: not even one sequence of max_model_len fits.
    """
    page_size = options.page_size or DEFAULT_PAGE_SIZE
    bytes_per_token = config.kv_bytes_per_token(dtype)
    bytes_per_page = page_size * bytes_per_token
    budget = options.pool_bytes or min(_CPU_POOL_BYTES, int(_CPU_POOL_FRACTION * _available_memory_bytes()))
    num_pages = budget // bytes_per_page
    needed = 1 + -(-max_model_len // page_size)
    if num_pages < needed:
        raise ModelError(
            f"the KV pool of {_size(budget)} holds {max(0, num_pages - 1) * page_size:,} tokens; "
            f"one sequence of {max_model_len:,} tokens (--max-model-len) needs {_size(needed * bytes_per_page)}",
            hint="Pass a smaller --max-model-len or a larger --kv-cache-memory-bytes.",
        )
    return PoolShape(num_pages=num_pages, page_size=page_size, bytes_per_token=bytes_per_token)


def plan_host_pages(shape: PoolShape, options: EngineOptions) -> int:
    """Pages of the host pool: as `swap_bytes` says, else a quarter of the page pool.

    On a CPU both are the same kind of memory, and untouched host pages take none of it.
    """
    if options.swap_bytes is None:
        return shape.num_pages // _HOST_POOL_DIVISOR
    return options.swap_bytes // (shape.page_size * shape.bytes_per_token)


def plan_device_host_pages(shape: PoolShape, options: EngineOptions) -> int:
    """Pages of a GPU's host pool: as `swap_bytes` says, else 4 GiB, but no more than a quarter of either memory.

    torch locks memory in powers of two (its CachingHostAllocator), so that 5 GiB would take 8: then it is 4.
    """
    bytes_per_page = shape.page_size * shape.bytes_per_token
    if options.swap_bytes is not None:
        budget, most = options.swap_bytes, options.swap_bytes // bytes_per_page
    else:
        budget = min(_LOCKED_BYTES, int(_LOCKED_FRACTION * _available_memory_bytes()))
        most = shape.num_pages // _HOST_POOL_DIVISOR
    num_pages = min(budget // bytes_per_page, most)
    locked = 1 << max(0, num_pages * bytes_per_page - 1).bit_length()
    return num_pages if locked <= budget else locked // 2 // bytes_per_page


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes >= 10 << 20 else f"{num_bytes:,} bytes"


def _available_memory_bytes() -> int:
    """Free memory of the machine, or of the container where that is less."""
    free = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(free, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return free
