"""A device as far behind as its marks allow: what is wrong with an order of work shows as wrong data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nightmill_worker.model.device import Device, Mark

GARBAGE = 0x5A


class LateDevice(Device):
    """Computes at once, since torch does. But copies back are made when a mark behind them is waited for, and whatever
    runs beside the steps when something holds for it: until then the destination is full of garbage.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[bool, list[Callable[[], None]]] = {False: [], True: []}  # of the steps, beside them
        self._is_beside = False

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = super().host_tensor(shape, dtype)
        tensor.view(-1).view(torch.uint8).fill_(GARBAGE)
        return tensor

    def to_device(self, destination: Tensor, source: Tensor) -> None:
        if self._is_beside:
            self.traffic.to_device += 1
            self._put_off(lambda: destination.copy_(source))
        else:
            super().to_device(destination, source)

    def to_host(self, destination: Tensor, source: Tensor) -> None:
        self.traffic.to_host += 1
        destination.view(-1).view(torch.uint8).fill_(GARBAGE)
        if self._is_beside:
            self._put_off(lambda: destination.copy_(source))
        else:  # in line with the steps: it reads what is there now, and shows it late
            copy = source.clone()
            self._put_off(lambda: destination.copy_(copy))

    def mark(self) -> Mark:
        return _LateMark(self)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._is_beside = True
        try:
            yield
        finally:
            self._is_beside = False

    def _put_off(self, work: Callable[[], object]) -> None:
        self._lines[self._is_beside].append(lambda: (work(), None)[1])

    @torch.inference_mode()
    def come_to(self, line: bool, end: int) -> bool:
        """Do what stands before `end`; whether anything was left to do."""
        works = self._lines[line]
        was_behind = any(work is not _nothing for work in works[:end])
        for index in range(end):
            works[index]()
            works[index] = _nothing
        return was_behind


class _LateMark:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._place: tuple[bool, int] | None = None

    def record(self) -> None:
        beside = self._device._is_beside
        self._place = (beside, len(self._device._lines[beside]))

    def wait(self) -> None:
        if self._place is not None and self._device.come_to(*self._place):
            self._device.traffic.waits += 1

    def hold(self) -> None:
        if self._place is not None:
            self._device.come_to(*self._place)

    def seconds_since(self, earlier: Mark) -> float:
        return 0.0


def _nothing() -> None: ...
