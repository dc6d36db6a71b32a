"""A step's inputs on their way to the device: written into one host buffer, sent in one copy."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightmill_worker.model.device import Device, Mark

ALIGNMENT = 16
"""Bytes; what Triton wants of a pointer to load 16 bytes at a time."""
_DTYPES: "dict[np.dtype[np.generic], torch.dtype]" = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.int64,  # the same bits: torch computes with few unsigned types
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
}


class StagingBuffer:
    """One place on the device, and several of its size on the host that take turns.

        put(a) put(b) flush()        host buffer 0 ──one copy──▶ device
        put(c) …                     host buffer 1: 0 may still be read by the copy; only when it is 0's turn again,
                                     the host waits for that copy

    The same puts in the same order land at the same places, so a captured graph may read them: put what varies in
    size last. On the device, what is put next is written over what was there after everything asked for before, since
    the copy goes through the same queue.
    """

    def __init__(self, device: Device, num_bytes: int, *, num_buffers: int = 2, head_bytes: int = 0) -> None:
        """
        Args:
            device: Where to.
            num_bytes: What fits. What does not is sent in a copy of its own.
            num_buffers: Host buffers; one more than steps in flight never waits.
            head_bytes: Of the device's buffer, at its front: never written to by a flush.
        """
        self._device = device
        self._head = _aligned(head_bytes)
        self._capacity = self._head + _aligned(num_bytes)
        self.device_bytes = torch.zeros(self._capacity, dtype=torch.uint8, device=device.torch_device)
        self._hosts = [device.host_tensor((self._capacity,), torch.uint8) for _ in range(num_buffers)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._marks: list[Mark] = [device.mark() for _ in range(num_buffers)]
        self._turn = 0
        self._end = self._head
        self._is_fresh = True  # nothing was put since the last flush
        self._oversized: list[tuple[Tensor, Tensor]] = []

    @property
    def offset(self) -> int:
        """Where the next put goes, in bytes."""
        return self._end

    def put(self, array: NDArray[np.generic], *, room: int | None = None, fill: float | None = 0) -> Tensor:
        """Write an array into the host buffer; it may change as soon as this returns.

        Args:
            array: int32, int64, uint64, float32, uint8 or bool, of any shape and strides.
            room: Entries of the first axis to make of it; those that it lacks are `fill`.
            fill: See `room`; None: whatever was there.

        Returns:
            The same place on the device, [room or len(array), …]: it holds the array after the next `flush`, until
            the flush after that. uint64 becomes int64.
        """
        if self._is_fresh:
            self._marks[self._turn].wait()
            self._is_fresh = False
        count = len(array) if room is None else room
        shape = (count, *array.shape[1:])
        num_bytes = array.itemsize * count * (array[:1].size if len(array) else int(np.prod(array.shape[1:])))
        start = self._end
        if start + num_bytes > self._capacity:
            return self._put_beside(array, shape, fill)
        self._end = start + _aligned(num_bytes)
        _write(self._arrays[self._turn][start : start + num_bytes], array, shape, fill)
        return self._view(start, num_bytes, shape, array.dtype)

    def at(self, offset: int, shape: tuple[int, ...], dtype: "np.dtype[np.generic]") -> Tensor:
        """A place of the buffer on the device: what a graph reads whose arrays differ in size from step to step.

        Raises:
            ValueError: It is not all within the buffer.
        """
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        if offset + num_bytes > self._capacity:
            raise ValueError(f"{shape} {dtype} at {offset} does not fit a staging buffer of {self._capacity} bytes")
        return self._view(offset, num_bytes, shape, dtype)

    def flush(self) -> None:
        """Send what was put since the last flush in one copy; nothing when nothing was."""
        if self._is_fresh:
            return
        if self._end > self._head:
            end = min(self._end, self._capacity)
            self._device.to_device(self.device_bytes[self._head : end], self._hosts[self._turn][self._head : end])
        for destination, source in self._oversized:
            self._device.to_device(destination, source)
        self._marks[self._turn].record()
        self._oversized.clear()
        self._turn = (self._turn + 1) % len(self._hosts)
        self._end = self._head
        self._is_fresh = True

    def _view(self, start: int, num_bytes: int, shape: tuple[int, ...], dtype: "np.dtype[np.generic]") -> Tensor:
        return self.device_bytes[start : start + num_bytes].view(_DTYPES[dtype]).view(shape)

    def _put_beside(self, array: NDArray[np.generic], shape: tuple[int, ...], fill: float | None) -> Tensor:
        host = self._device.host_tensor(shape, _DTYPES[array.dtype])
        _write(host.numpy().reshape(-1).view(np.uint8), array, shape, fill)
        place = torch.empty_like(host, device=self._device.torch_device)
        self._oversized.append((place, host))
        return place


def _write(place: NDArray[np.uint8], array: NDArray[np.generic], shape: tuple[int, ...], fill: float | None) -> None:
    typed = place.view(array.dtype).reshape(shape)
    typed[: len(array)] = array
    if len(array) < shape[0] and fill is not None:
        typed[len(array) :] = fill


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
