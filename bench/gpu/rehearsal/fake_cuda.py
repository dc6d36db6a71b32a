"""A CUDA device of shapes alone: its tensors have no values, its copies move nothing, its graphs compute nothing."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.gpu.rehearsal.fake_tensors import FakeTensors, Recording
from nightmill_worker.model.device import Device, DeviceMemory, Graph

_GIB = 1 << 30
_ACTIVATIONS = 2 * _GIB


_TRIED = 2  # replays of a graph that are compared with what it recorded


class FreedError(AssertionError):
    """A graph reads memory that has been freed since it was recorded."""


class StaleError(AssertionError):
    """The work of a graph reads other memory now than when it was recorded: the graph would still read the old."""


class FakeCuda(Device):
    """With the sizes of an H200 that nobody else uses."""

    capability = (9, 0)

    def __init__(self, tensors: FakeTensors) -> None:
        super().__init__("cuda:0", num_sms=132)
        self.tensors = tensors
        self.graphs: list[FakeGraph] = []

    def to_device(self, destination: Tensor, source: Tensor) -> None:
        """Count it, and look whether it is one copy from page-locked memory."""
        self.traffic.to_device += 1
        _check_copy(destination, source, on_device=destination)

    def to_host(self, destination: Tensor, source: Tensor) -> None:
        """Count it, and look."""
        self.traffic.to_host += 1
        _check_copy(destination, source, on_device=source)

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Real memory: zeros, which are valid tokens."""
        return torch.zeros(shape, dtype=dtype)

    def capture(self, work: Callable[[], None]) -> Graph:
        """As CudaDevice does it: run, then recorded."""
        with self.tensors.unrecorded():
            work()
            with self.tensors.recording() as recording:
                work()
        graph = FakeGraph(work, self, recording)
        self.graphs.append(graph)
        return graph

    def memory(self) -> DeviceMemory:
        """Bytes."""
        return DeviceMemory(total=140 * _GIB, free=138 * _GIB)

    def peak_of(self, work: Callable[[], None]) -> int:
        """Assumed: the largest step of a start plans from values on the device, and may wait for them."""
        return _ACTIVATIONS


class FakeGraph:
    """Without values there is nothing to compute again: what it read when recorded must still be what is read."""

    def __init__(self, work: Callable[[], None], device: FakeCuda, recording: Recording) -> None:
        self._work, self._device, self._recording = work, device, recording
        self._num_tried = 0

    @property
    def num_launches(self) -> int:
        """Of kernels, ours and torch's."""
        return self._recording.launches.total()

    def replay(self) -> None:
        """
        Raises:
            FreedError: On a device this would read and write what belongs to others by now.
            StaleError: Or what nobody writes any more.
        """
        if freed := self._recording.num_freed():
            raise FreedError(f"a graph reads {freed} pieces of memory that were freed after it was recorded")
        if self._num_tried < _TRIED:
            self._num_tried += 1
            with self._device.tensors.unrecorded(), self._device.tensors.recording() as again:
                self._work()
            if other := len(again.outside ^ self._recording.outside):
                raise StaleError(f"a graph's work reads {other} other pieces of memory than when it was recorded")
        self._device.traffic.replays += 1


def _check_copy(destination: Tensor, source: Tensor, *, on_device: Tensor) -> None:
    on_host = source if on_device is destination else destination
    assert on_device.is_cuda, f"{on_device.device} is no device"
    assert on_host.device.type == "cpu", f"{on_host.device} is no host"
    assert destination.shape == source.shape, f"{tuple(source.shape)} into {tuple(destination.shape)}"
    assert destination.dtype == source.dtype, f"{source.dtype} into {destination.dtype}: through a copy of its own"
    # Otherwise torch copies through a buffer of its own, and waits.
    assert destination.is_contiguous(), "a copy between host and device into pieces"
    assert source.is_contiguous(), "a copy between host and device of pieces"
