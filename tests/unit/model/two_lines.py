"""A device with two lines of work, whose pace a test decides: only marks put an order between them."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from nightmill_worker.model.device import Device, Mark

MAIN, BESIDE = 0, 1


@dataclass
class _Line:
    work: list[Callable[[], bool]] = field(default_factory=list)  # each says whether it could be done
    done: int = 0


class TwoLines(Device):
    """Copies and whatever `ask` is given are done when something waits for them, in any order that marks allow.

    Args:
        seed: Of the order.
        likely: How likely the first line goes on where both could: 0 and 1 are the two extremes.
    """

    def __init__(self, seed: int, likely: float) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._likely = likely
        self._lines = (_Line(), _Line())
        self._current = MAIN

    def ask(self, work: Callable[[], object]) -> None:
        """Put it into the line that is current."""
        self._lines[self._current].work.append(lambda: (work(), True)[1])

    def finish(self) -> None:
        """Do all that was asked for."""
        self._run_until(lambda: all(line.done == len(line.work) for line in self._lines))

    def to_device(self, destination: Tensor, source: Tensor) -> None:
        self.ask(lambda: destination.copy_(source))

    def to_host(self, destination: Tensor, source: Tensor) -> None:
        self.ask(lambda: destination.copy_(source))

    def mark(self) -> Mark:
        return _Place(self)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._current = BESIDE
        try:
            yield
        finally:
            self._current = MAIN

    def _run_until(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            first = MAIN if self._random.random() < self._likely else BESIDE
            assert any(self._advance(self._lines[index]) for index in (first, 1 - first)), "both lines hold"

    def _advance(self, line: _Line) -> bool:
        if line.done == len(line.work) or not line.work[line.done]():
            return False
        line.done += 1
        return True


class _Place:
    def __init__(self, device: TwoLines) -> None:
        self._device = device
        self._line, self._end = device._lines[MAIN], 0

    def record(self) -> None:
        self._line = self._device._lines[self._device._current]
        self._end = len(self._line.work)

    def wait(self) -> None:
        line, end = self._line, self._end
        self._device._run_until(lambda: line.done >= end)

    def hold(self) -> None:
        line, end = self._line, self._end
        self._device._lines[self._device._current].work.append(lambda: line.done >= end)

    def seconds_since(self, earlier: Mark) -> float:
        return 0.0
