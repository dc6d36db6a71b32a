"""Tensors on a device that is not there, by torch's FakeTensorMode, which follows shapes, dtypes and devices.

The host's tensors stay real, so that what is staged can be written. Whatever needs a value of the device fails.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

aten: Any = torch.ops.aten
# Views, and memory without a value: nothing is launched.
_FREE = {
    *("view", "slice", "select", "as_strided", "alias", "detach", "t", "transpose", "unsqueeze", "squeeze", "expand"),
    *("split_with_sizes", "_unsafe_view", "permute", "empty", "empty_strided", "new_empty", "empty_like", "flatten"),
    *("reshape", "unbind", "device"),
}
_BASE_ADDRESS = 1 << 40


class HostWaitsError(AssertionError):
    """An operation brings values to the host, and waits for them."""


class UnstagedCopyError(AssertionError):
    """A step copies between host and device otherwise than through the device's counted copies."""


class Recording:
    """What was launched while it was open, and the memory it read that had been there before."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self._read: set[StorageWeakRef] = set()
        self._made: set[StorageWeakRef] = set()

    def launch(self, name: str, tensors: list[FakeTensor]) -> None:
        """A kernel with these arguments."""
        self.launches[name] += 1
        self._read.update(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)

    def make(self, tensors: list[FakeTensor]) -> None:
        """These came out of an operation, in memory of their own."""
        self._made.update(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)

    @property
    def outside(self) -> frozenset[StorageWeakRef]:
        """Pieces of memory that were read, and not made meanwhile."""
        return frozenset(self._read - self._made)

    def num_freed(self) -> int:
        """Of those, how many are no longer there."""
        return sum(storage.expired() for storage in self.outside)


class FakeTensors:
    """A context in which `device="cuda:0"` gives tensors without values."""

    def __init__(self) -> None:
        self._recordings: list[Recording] = []
        self._modes = ExitStack()
        self.is_stepping = False  # in a step, whose copies are counted

    def __enter__(self) -> "FakeTensors":
        for mode in (FakeTensorMode(allow_non_fake_inputs=True), _Methods(), _Dispatch(self)):
            self._modes.enter_context(mode)
        # What Triton asks a tensor for: whether it is aligned depends on where in its memory a view begins.
        self._modes.callback(setattr, FakeTensor, "data_ptr", FakeTensor.data_ptr)
        FakeTensor.data_ptr = _address  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._modes.__exit__(kind, error, trace)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Note what is launched in this block."""
        recording = Recording()
        self._recordings.append(recording)
        try:
            yield recording
        finally:
            self._recordings.remove(recording)

    @contextmanager
    def stepping(self) -> Iterator[Recording]:
        """A step: what is launched in it, and no copies but the device's own."""
        self.is_stepping = True
        try:
            with self.recording() as recording:
                yield recording
        finally:
            self.is_stepping = False

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """What is launched in this block is nobody's: it is in a graph, and that is launched as one."""
        recordings, self._recordings = self._recordings, []
        try:
            yield
        finally:
            self._recordings = recordings

    def launch(self, name: str, tensors: list[FakeTensor]) -> None:
        """A kernel with these arguments, of ours or of torch's."""
        for recording in self._recordings:
            recording.launch(name, tensors)

    def make(self, tensors: list[FakeTensor]) -> None:
        """These came out of an operation, in memory of their own."""
        for recording in self._recordings:
            recording.make(tensors)


class _Dispatch(TorchDispatchMode):
    """Operations on the host's tensors are done; others go on to FakeTensorMode."""

    def __init__(self, owner: FakeTensors) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        places = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        if not fakes and all(place.type == "cpu" for place in places):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func.overloadpacket is aten.copy_ and not all(isinstance(one, FakeTensor) for one in args[:2]):
            self._refuse_in_step("copy_")
            return args[0]
        if func.overloadpacket in (aten._to_copy, aten.to):
            if not fakes:  # to the device; FakeTensorMode would try to keep the value
                self._refuse_in_step("to")
                return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=places[0])
            if any(place.type == "cpu" for place in places):
                raise HostWaitsError(f"{func} brings {tuple(fakes[0].shape)} to the host and waits for it")
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name not in _FREE:
            self._owner.launch(name, fakes)
        # What is a view of an argument, or the argument itself, was there before.
        before = {StorageWeakRef(fake.untyped_storage()) for fake in fakes}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        self._owner.make([one for one in made if StorageWeakRef(one.untyped_storage()) not in before])
        return result

    def _refuse_in_step(self, name: str) -> None:
        if self._owner.is_stepping:
            raise UnstagedCopyError(f"{name} copies between host and device beside the step's one copy")


class _Methods(TorchFunctionMode):
    """What these methods do, by operators: as methods they want a device, which a torch without CUDA does not have."""

    _CASTS: ClassVar = {
        Tensor.long: torch.int64,
        Tensor.int: torch.int32,
        Tensor.float: torch.float32,
        Tensor.double: torch.float64,
        Tensor.half: torch.float16,
        Tensor.bool: torch.bool,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], FakeTensor) != isinstance(args[1], FakeTensor):
            return aten.copy_.default(*args[:2])
        if func is torch.tensor and torch.device((kwargs or {}).get("device") or "cpu").type != "cpu":
            kwargs = dict(kwargs)
            return func(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])
        if args and isinstance(args[0], FakeTensor):
            if func is Tensor.__getitem__:
                return _index(*args)
            if func is Tensor.__invert__:
                return torch.bitwise_not(args[0])
            if func in self._CASTS:
                return _cast(args[0], self._CASTS[func])
            if func is Tensor.to and isinstance(args[1], torch.dtype):
                return _cast(*args)
        return func(*args, **(kwargs or {}))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else aten._to_copy.default(tensor, dtype=dtype)


def _index(tensor: Tensor, key: Any) -> Tensor:
    keys = key if isinstance(key, tuple) else (key,)
    taken = sum(one is not None and one is not Ellipsis for one in keys)
    dim, by_tensor = 0, {}
    for one in keys:
        if one is Ellipsis:
            dim += tensor.dim() - taken
        elif one is None:
            tensor = tensor.unsqueeze(dim)
            dim += 1
        elif isinstance(one, int | np.integer):
            tensor = tensor.select(dim, int(one))
        elif isinstance(one, slice):
            tensor = aten.slice.Tensor(tensor, dim, one.start, one.stop, 1 if one.step is None else one.step)
            dim += 1
        else:
            by_tensor[dim] = one
            dim += 1
    if by_tensor:
        tensor = aten.index.Tensor(tensor, [by_tensor.get(at) for at in range(max(by_tensor) + 1)])
    return tensor


def _address(tensor: FakeTensor) -> int:
    """Every piece of memory begins at a multiple of 512 bytes, as torch's do."""
    return _BASE_ADDRESS + tensor.storage_offset() * tensor.element_size()
