"""Where a CPU step's seconds go: times every call into the C library and every matrix product of torch.

What is left of a step is host time: Python, numpy, torch's other operators, the building of calls. So a part holds what
runs in C or oneDNN and nothing else, but for what a call through ctypes or torch's dispatcher costs (torch's: about
5 µs a product). The timer's own cost, some 0.3 µs a call, is measured by `overhead_s` and lies in the host's share.

A recorded step is one call. While `split` is set it is done call by call, which costs the host some µs each that it
does not spend otherwise: so the parts' shares of recorded steps are taken from one run, and seconds from another.
"""

import time
from collections.abc import Callable
from ctypes import byref, sizeof
from enum import StrEnum
from typing import Any


class Part(StrEnum):
    """What a call computes."""

    LINEARS = "linears"
    HEAD = "head"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    DRAW = "draw"
    RECORDED = "recorded steps"


Seconds = dict[Part, float]

_BY_NAME = {
    "nm_paged_attention": Part.ATTENTION,
    "nm_linear": Part.LINEARS,
    "nm_linear_int8": Part.LINEARS,
    "nm_argmax": Part.DRAW,
    "nm_draw": Part.DRAW,
    "nm_replay": Part.RECORDED,
}
_UNTIMED = ("nm_abi", "nm_set_parallel")


class PartTimer:
    """Sums the seconds of each part. Install it before the first kernel is called.

    Args:
        clock: Wall time, or the calling thread's CPU time: of the host's work it says the same, and other processes
            disturb it much less.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.split = False
        self.recorded = dict.fromkeys(Part, 0.0)
        """Seconds of each part in recorded steps, while `split` was set."""
        self._seconds = dict.fromkeys(Part, 0.0)
        self.num_calls = 0
        self._in_head = False

    def install(self) -> None:
        """Put a stopwatch around the C library's functions, torch's products and the output projection."""
        import torch

        from nightmill_kernels.cpu import loader
        from nightmill_worker.model.decoder import Decoder

        load, project = loader.load, Decoder.project

        def timed_project(decoder: Decoder, *args: Any, **kwargs: Any) -> Any:
            self._in_head = True
            try:
                return project(decoder, *args, **kwargs)
            finally:
                self._in_head = False

        loader.load = lambda isa: _TimedLibrary(load(isa), self)  # type: ignore[assignment,return-value]
        Decoder.project = timed_project  # type: ignore[method-assign]
        torch.nn.functional.linear = self.timed(torch.nn.functional.linear, Part.LINEARS)
        operators = torch.ops.mkldnn
        operators._linear_pointwise = self.timed(operators._linear_pointwise, Part.LINEARS)

    def read(self) -> Seconds:
        """Seconds of each part so far."""
        return dict(self._seconds)

    def timed(self, function: Callable[..., Any], part: Part) -> "Callable[..., Any]":
        """The same function with its seconds counted under a part."""
        return _Timed(function, self, part)

    def overhead_s(self) -> float:
        """What timing one call costs."""
        timer = PartTimer(self.clock)
        plain, timed = (lambda: None), timer.timed(lambda: None, Part.DRAW)

        def seconds(function: Callable[[], Any]) -> float:
            started = time.perf_counter()
            for _ in range(10_000):
                function()
            return time.perf_counter() - started

        return min(seconds(timed) - seconds(plain) for _ in range(5)) / 10_000

    def add(self, part: Part, seconds: float) -> None:
        """Count a call."""
        self._seconds[Part.HEAD if self._in_head and part is Part.LINEARS else part] += seconds
        self.num_calls += 1


class _Timed:
    """A function, foreign ones with their argtypes and restype too, and a stopwatch."""

    def __init__(self, function: Callable[..., Any], timer: PartTimer, part: Part) -> None:
        self.__dict__.update(_function=function, _add=timer.add, _part=part, _clock=timer.clock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = self._clock()
        result = self._function(*args, **kwargs)
        self._add(self._part, self._clock() - started)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._function, name, value)


class _TimedLibrary:
    """The C library with every function that computes timed."""

    def __init__(self, library: Any, timer: PartTimer) -> None:
        self._library, self._timer = library, timer

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name == "nm_replay":
            function = _Replay(function, self._timer)
        elif name not in _UNTIMED:
            function = self._timer.timed(function, _BY_NAME.get(name, Part.POINTWISE))
        self.__dict__[name] = function
        return function


class _Replay:
    """nm_replay, all at once or one call of the recording at a time."""

    def __init__(self, function: Any, timer: PartTimer) -> None:
        self.__dict__.update(_function=function, _timer=timer, _whole=timer.timed(function, Part.RECORDED))

    def __call__(self, calls: Any, count: int, step: Any, stopped_at: Any) -> int:
        if not self._timer.split:
            return int(self._whole(calls, count, step, stopped_at))
        from nightmill_kernels.cpu.recording import Op, Recorded

        names = [Op(calls[i].op).name for i in range(count)]
        linears = [i for i in range(count) if names[i].startswith("LINEAR")]
        parts = {"ATTENTION": Part.ATTENTION, **{names[i]: Part.LINEARS for i in linears}}
        clock, add, recorded = self._timer.clock, self._timer.add, self._timer.recorded
        for i in range(count):
            part = Part.HEAD if i == linears[-1] else parts.get(names[i], Part.POINTWISE)
            call = byref(calls, i * sizeof(Recorded))
            started = clock()
            status = self._function(call, 1, step, stopped_at)
            seconds = clock() - started
            add(part, seconds)
            recorded[part] += seconds
            if status:
                return int(status)
        return 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "argtypes":  # a place within the steps is passed, and not the whole array
            setattr(self._function, name, value)
