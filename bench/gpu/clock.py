"""Seconds that work takes on a device: between events in its queue, not by the host's clock; medians."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Work = Callable[[], object]


def synchronize(device: str) -> None:
    """Wait for everything asked of the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(work: Work, device: str, *, repeats: int = 10, warm_up: int = 3) -> float:
    """The median over `repeats` calls, each between two events."""
    for _ in range(warm_up):
        work()
    if device == "cpu":
        return statistics.median(_host_seconds(work) for _ in range(repeats))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    for begin, end in pairs:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def seconds_in_graph(works: Sequence[Work], device: str, *, repeats: int = 10) -> float:
    """Seconds of one of `works`, all of them captured in one graph: without the gaps between launches.

    Give different inputs whose sizes together exceed the cache, or the cache is what is measured.
    """
    if device == "cpu":
        return seconds_of(lambda: [work() for work in works], device, repeats=1, warm_up=0) / len(works)
    return seconds_of(captured(works).replay, device, repeats=repeats) / len(works)


def captured(works: Sequence[Work]) -> torch.cuda.CUDAGraph:
    """A graph of these launches, in order. They run once before: libraries and compilers get ready."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for work in works:
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    return graph


def host_seconds_per_call(work: Work, device: str, *, calls: int = 200) -> float:
    """What a call costs the host when nobody waits for the device."""
    for _ in range(3):
        work()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        work()
    seconds = (time.perf_counter() - begun) / calls
    synchronize(device)
    return seconds


def _host_seconds(work: Work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
