"""Counts what would be kernel launches on a GPU: torch operations that compute, and calls of our own kernels."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nightmill_kernels.cpu.library import Library
from nightmill_worker.model.device import Device

# They make tensors of memory that is there, or memory without a value.
_FREE = {
    *("view", "slice", "select", "as_strided", "alias", "detach", "t", "transpose", "unsqueeze", "squeeze", "expand"),
    *("split_with_sizes", "_unsafe_view", "permute", "empty", "empty_strided", "new_empty", "empty_like", "resize_"),
    *("lift_fresh", "_to_copy", "flatten", "reshape"),
}
_OURS = ("paged_attention", "rms_norm", "rope_store", "gated_mul", "argmax", "draw", "linear", "linear_rows")


class LaunchCounter(TorchDispatchMode):
    """What runs in a `replay` is the graph's and does not count; neither do the copies that the device counts."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.launches = 0
        self.names: list[str] = []
        self._device = device
        self._patch: Any = None

    def __enter__(self) -> "LaunchCounter":
        import pytest

        self._patch = pytest.MonkeyPatch()
        for name in _OURS:
            self._patch.setattr(Library, name, self._counted(name, getattr(Library, name)))
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exc: Any) -> None:
        self._patch.undo()
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_transfer = name == "copy_" and args[0].dtype == torch.uint8
        if name not in _FREE and not is_transfer:
            self._count(name)
        return func(*args, **(kwargs or {}))

    def _counted(self, name: str, original: Any) -> Any:
        def call(library: Library, *args: Any) -> Any:
            self._count(name)
            return original(library, *args)

        return call

    def _count(self, name: str) -> None:
        if not self._device.is_replaying:
            self.launches += 1
            self.names.append(name)
