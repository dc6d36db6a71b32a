"""Recorded decode steps: a few hundred launches become one."""

from collections.abc import Callable
from time import perf_counter

from nightmill_worker.model.device import Device, Graph
from nightmill_worker.model.layers import StepTensors

MAX_ROWS = 512
_SMALLEST = (1, 2, 4, 8)
_STEP = 8


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batches that graphs are recorded for: 1, 2, 4, 8, 16, 24, … and `max_num_seqs` itself, up to 512."""
    largest = min(max_num_seqs, MAX_ROWS)
    regular = (*_SMALLEST, *range(_SMALLEST[-1] + _STEP, largest + 1, _STEP))
    return (*(size for size in regular if size < largest), largest)


class DecodeGraphs:
    """The graphs of one model, by (rows, whether rows may share prefixes).

    A graph reads a step's inputs at the places where they are staged, so its tensors are those of any step of its size.
    """

    def __init__(self, device: Device, sizes: tuple[int, ...], forward: Callable[[StepTensors, int], None]) -> None:
        """
        Args:
            device: Records.
            sizes: Ascending.
            forward: From inputs of so many rows to logits at a fixed place; must not wait, allocate by what is in the
                inputs, or read them on the host.
        """
        self._device = device
        self._sizes = sizes
        self._forward = forward
        self._graphs: dict[tuple[int, bool], Graph] = {}
        self.capture_s = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ascending."""
        return self._sizes

    @property
    def num_captured(self) -> int:
        """So far."""
        return len(self._graphs)

    def size_for(self, num_rows: int) -> int | None:
        """Rows of the smallest graph that takes a step of so many; None: too many for any."""
        return next((size for size in self._sizes if size >= num_rows), None) if num_rows else None

    def replay(self, size: int, tensors: StepTensors, *, grouped: bool) -> None:
        """Compute the staged step.

        Args:
            size: Rows, padding included.
            tensors: The staged inputs; looked at only when this graph has not been recorded yet.
            grouped: Whether rows may share prefixes.
        """
        graph = self._graphs.get((size, grouped))
        if graph is None:
            graph = self.capture(size, tensors, grouped=grouped)
        graph.replay()

    def capture(self, size: int, tensors: StepTensors, *, grouped: bool) -> Graph:
        """Record the graph for inputs that are staged and sent: a first run writes what they say."""
        started = perf_counter()
        graph = self._device.capture(lambda: self._forward(tensors, size))
        self._graphs[size, grouped] = graph
        self.capture_s += perf_counter() - started
        return graph
