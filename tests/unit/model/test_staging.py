import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nightmill_worker.model.device import Device
from nightmill_worker.model.staging import ALIGNMENT, StagingBuffer

DTYPES = [np.int32, np.int64, np.uint64, np.float32, np.uint8, np.bool_]


class SlowMark:
    """Passed only when it is waited for, as a device's that has much to do."""

    def __init__(self, device: "SlowDevice") -> None:
        self._device = device
        self._stands_at = 0

    def record(self) -> None:
        self._stands_at = len(self._device.queue)

    def wait(self) -> None:
        for copy in self._device.queue[: self._stands_at]:
            copy()
        self._device.queue[: self._stands_at] = [lambda: None] * self._stands_at

    def hold(self) -> None: ...

    def seconds_since(self, earlier: object) -> float:
        return 0.0


class SlowDevice(Device):
    """Reads host memory as late as it may."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list = []

    def to_device(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.traffic.to_device += 1
        self.queue.append(lambda: destination.copy_(source))

    def mark(self) -> SlowMark:
        return SlowMark(self)


def arrays() -> st.SearchStrategy[list[np.ndarray]]:
    shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
    one = st.tuples(st.sampled_from(DTYPES), shapes, st.integers(0, 2**31))
    return st.lists(one.map(lambda t: _random(*t)), min_size=1, max_size=8)


def _random(dtype: type, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**63, shape, np.uint64).astype(dtype)


@given(arrays())
def test_what_was_put_is_on_the_device_after_one_copy(parts: list[np.ndarray]) -> None:
    device = Device()
    staging = StagingBuffer(device, 1 << 14)
    places = [staging.put(part) for part in parts]
    assert device.traffic.to_device == 0
    staging.flush()
    assert device.traffic.to_device == (1 if any(part.size for part in parts) else 0)
    for part, place in zip(parts, places, strict=True):
        assert place.shape == part.shape
        assert place.data_ptr() % ALIGNMENT == 0 or not part.size
        found = place.numpy()
        assert found.tobytes() == part.tobytes()
        assert found.dtype == (np.int64 if part.dtype == np.uint64 else part.dtype)


def test_nothing_is_there_before_the_flush() -> None:
    staging = StagingBuffer(Device(), 256)
    place = staging.put(np.full(4, 7, np.int32))
    assert place.tolist() == [0, 0, 0, 0]
    staging.flush()
    assert place.tolist() == [7, 7, 7, 7]


def test_the_same_puts_land_at_the_same_places_in_every_turn() -> None:
    staging = StagingBuffer(Device(), 1 << 12)
    seen = set()
    for turn in range(1, 6):
        first = staging.put(np.arange(3, dtype=np.int32) + turn, room=8, fill=-1)
        second = staging.put(np.arange(4, dtype=np.int64), room=4)
        variable = staging.put(np.arange(turn, dtype=np.float32))
        staging.flush()
        seen.add((first.data_ptr(), second.data_ptr(), variable.data_ptr()))
        assert first.tolist() == [turn, turn + 1, turn + 2, -1, -1, -1, -1, -1]
    assert len(seen) == 1


def test_views_strides_and_rows_of_a_matrix_are_taken() -> None:
    staging = StagingBuffer(Device(), 1 << 12)
    matrix = np.arange(24, dtype=np.int32).reshape(4, 6)
    matrix.setflags(write=False)
    places = [staging.put(matrix[:, ::2]), staging.put(matrix[::-1, 1]), staging.put(matrix[1:3], room=3, fill=9)]
    staging.flush()
    assert places[0].tolist() == matrix[:, ::2].tolist()
    assert places[1].tolist() == matrix[::-1, 1].tolist()
    assert places[2].tolist() == [*matrix[1:3].tolist(), [9] * 6]


def test_copies_that_are_made_late_still_find_what_was_put() -> None:
    """Step 1 is staged while the copy of step 0 has not been made."""
    device = SlowDevice()
    staging = StagingBuffer(device, 256)
    received = []
    for turn in range(7):
        values = np.full(4, turn, np.int32)
        place = staging.put(values)
        values[:] = -1
        staging.flush()
        copy = device.queue[-1]
        device.queue[-1] = lambda copy=copy, place=place: (copy(), received.append(place.tolist()))
    staging.put(np.zeros(1, np.int32))
    for copy in device.queue:
        copy()
    assert received == [[turn] * 4 for turn in range(7)]


def test_what_does_not_fit_travels_on_its_own() -> None:
    device = Device()
    staging = StagingBuffer(device, 64)
    small, large = staging.put(np.arange(8, dtype=np.int32)), staging.put(np.arange(100, dtype=np.int64), room=101)
    again = staging.put(np.arange(4, dtype=np.int32))
    staging.flush()
    assert device.traffic.to_device == 2
    assert small.tolist() == list(range(8))
    assert large.tolist() == [*range(100), 0]
    assert again.tolist() == [0, 1, 2, 3]
    staging.put(np.arange(8, dtype=np.int32))
    staging.flush()
    assert device.traffic.to_device == 3


def test_the_head_is_never_written_to() -> None:
    staging = StagingBuffer(Device(), 64, head_bytes=20)
    staging.device_bytes[:20] = 5
    place = staging.put(np.zeros(16, np.int32))
    staging.flush()
    assert place.tolist() == [0] * 16
    assert staging.device_bytes[:20].tolist() == [5] * 20


def test_a_dtype_that_has_no_place_is_refused() -> None:
    with pytest.raises(KeyError):
        StagingBuffer(Device(), 64).put(np.zeros(2, np.float64))
