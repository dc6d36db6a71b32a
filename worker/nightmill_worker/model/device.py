"""What a runner asks of the device it runs on: memory, copies, marks in its queue of work. All of them are counted."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import psutil
import torch
from torch import Tensor


@dataclass(slots=True)
class Traffic:
    """How often a device was asked for something; the difference of two snapshots is what a step cost."""

    to_device: int = 0  # copies host → device
    to_host: int = 0  # copies device → host
    waits: int = 0  # times the host had to wait for the device
    replays: int = 0  # graphs launched

    def since(self, earlier: "Traffic") -> "Traffic":
        """What came on top of `earlier`."""
        return Traffic(
            to_device=self.to_device - earlier.to_device,
            to_host=self.to_host - earlier.to_host,
            waits=self.waits - earlier.waits,
            replays=self.replays - earlier.replays,
        )

    def snapshot(self) -> "Traffic":
        """A copy."""
        return Traffic(self.to_device, self.to_host, self.waits, self.replays)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device, of all processes on it."""

    total: int
    free: int


class Mark(Protocol):
    """A place in the device's queue of work, to be waited for or measured from; may be recorded again and again."""

    def record(self) -> None:
        """Stand behind everything asked of the device so far, on the stream that is current."""
        ...

    def wait(self) -> None:
        """Return when the device has come past the last record; at once when there was none."""
        ...

    def hold(self) -> None:
        """What is asked of the stream that is current from here on waits for the last record; the host does not."""
        ...

    def seconds_since(self, earlier: "Mark") -> float:
        """Time between two records that the device has come past."""
        ...


class Graph(Protocol):
    """A recorded piece of work."""

    def replay(self) -> None:
        """Ask for the same work once more, on the same memory."""
        ...


class Device:
    """The CPU, which does what it is asked for at once; base of CudaDevice."""

    capability: tuple[int, int] | None = None  # compute capability of a GPU

    def __init__(self, name: str = "cpu", *, num_sms: int = 1) -> None:
        self.torch_device = torch.device(name)
        self.num_sms = num_sms  # multiprocessors, each of which runs a few programs of a kernel at once
        self.traffic = Traffic()
        self.is_replaying = False  # what runs now is inside a graph

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Unwritten host memory that this device copies from and to without a detour."""
        return torch.empty(shape, dtype=dtype)

    def to_device(self, destination: Tensor, source: Tensor) -> None:
        """Copy host memory to the device; `source` stays as it is until a mark after this was passed."""
        self.traffic.to_device += 1
        destination.copy_(source, non_blocking=True)

    def to_host(self, destination: Tensor, source: Tensor) -> None:
        """Copy to host memory, which may be read once a mark after this was passed."""
        self.traffic.to_host += 1
        destination.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """A new mark, not recorded."""
        return _Instant()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is asked for in this block runs beside what is asked for outside; only marks give it an order."""
        yield

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` asks for. It must have run before: nothing may be compiled or set up in a capture."""
        work()
        return _Repeat(work, self)

    def memory(self) -> DeviceMemory:
        """Now."""
        memory = psutil.virtual_memory()
        return DeviceMemory(total=int(memory.total), free=int(memory.available))

    def peak_of(self, work: Callable[[], None]) -> int:
        """Bytes that `work` needs beside what is there, at its worst; 0 where it is not known."""
        work()
        return 0


class _Instant:
    """A mark of a device that is never behind."""

    def __init__(self) -> None:
        self._at: float | None = None

    def record(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        pass

    def hold(self) -> None:
        pass

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Instant)
        assert self._at is not None
        assert earlier._at is not None
        return self._at - earlier._at


class _Repeat:
    """A graph's stand-in: does the work again."""

    def __init__(self, work: Callable[[], None], device: Device) -> None:
        self._work = work
        self._device = device

    def replay(self) -> None:
        self._device.traffic.replays += 1
        self._device.is_replaying = True
        try:
            self._work()
        finally:
            self._device.is_replaying = False
