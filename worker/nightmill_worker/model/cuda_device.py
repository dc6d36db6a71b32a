"""An NVIDIA GPU. Nothing here runs without one, so it is kept to calls of torch that need no thought."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nightmill_worker.model.device import Device, DeviceMemory, Graph, Mark, Traffic

cuda: Any = torch.cuda  # most of it has no types


class CudaDevice(Device):
    """The current CUDA device: work runs on torch's current stream, copies beside it on one of their own."""

    def __init__(self) -> None:
        index = cuda.current_device()
        super().__init__(f"cuda:{index}", num_sms=cuda.get_device_properties(index).multi_processor_count)
        self.capability = cuda.get_device_capability(index)
        self._side = cuda.Stream()
        self._capture_stream = cuda.Stream()
        self._pool: Any = None

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Page-locked: copies from other memory would wait for the device."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        """An event."""
        return _Event(self.traffic)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """On the side stream."""
        with cuda.stream(self._side):
            yield

    def capture(self, work: Callable[[], None]) -> Graph:
        """Runs `work` on the capture stream first, as torch asks for: libraries get their workspace there.

        All graphs share one memory pool, which no two of them use at a time. Capture the largest first.
        """
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
        self._capture_stream.wait_stream(cuda.current_stream())
        with cuda.stream(self._capture_stream):
            work()
        cuda.current_stream().wait_stream(self._capture_stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool, stream=self._capture_stream):
            work()
        return _CudaGraph(graph, self.traffic)

    def memory(self) -> DeviceMemory:
        """As the driver says; what torch has reserved but does not use counts as free."""
        free, total = cuda.mem_get_info()
        unused = cuda.memory_reserved() - cuda.memory_allocated()
        return DeviceMemory(total=total, free=free + unused)

    def peak_of(self, work: Callable[[], None]) -> int:
        """By torch's own count of what it had reserved."""
        cuda.synchronize()
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        work()
        cuda.synchronize()
        peak = cuda.max_memory_reserved() - before
        cuda.empty_cache()
        return max(0, int(peak))


class _Event:
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._event = cuda.Event(enable_timing=True)
        self._recorded = False

    def record(self) -> None:
        self._event.record()
        self._recorded = True

    def wait(self) -> None:
        if self._recorded and not self._event.query():
            self._traffic.waits += 1
            self._event.synchronize()

    def hold(self) -> None:
        if self._recorded:
            cuda.current_stream().wait_event(self._event)

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Event)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class _CudaGraph:
    def __init__(self, graph: Any, traffic: Traffic) -> None:
        self._graph = graph
        self._traffic = traffic

    def replay(self) -> None:
        self._traffic.replays += 1
        self._graph.replay()
