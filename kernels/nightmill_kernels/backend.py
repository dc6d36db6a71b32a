"""Which implementation a call gets: Triton on a GPU, the C library on a CPU, or the torch reference."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from torch import Tensor

from nightmill_kernels.cpu.isa import REFERENCE, check_isa, chosen_isa
from nightmill_kernels.cpu.library import DTYPES, Library
from nightmill_kernels.cpu.loader import BuildError

TRITON = "triton"
_log = logging.getLogger(__name__)
_forced: ContextVar[str | None] = ContextVar("nightmill_kernels_isa", default=None)


def on_triton(tensor: Tensor) -> bool:
    """True when a call with this tensor goes to the Triton kernel: it is on a GPU, or a test asked for it."""
    forced = _forced.get()
    return forced == TRITON or (forced is None and tensor.device.type == "cuda")


@contextmanager
def use_triton() -> Iterator[None]:
    """Run calls of this block through Triton; on CPU tensors in its interpreter (TRITON_INTERPRET=1). For tests."""
    token = _forced.set(TRITON)
    try:
        yield
    finally:
        _forced.reset(token)


def library_for(*tensors: Tensor) -> Library | None:
    """The C library when it takes tensors like these (CPU, all fp32 or all bf16), else None: use the reference."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES or _forced.get() == TRITON:
        return None
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.device.type != "cpu":
            return None
    return _library(_forced.get() or _default_isa())


def active_isa() -> str:
    """What CPU calls run on now: an instruction set of the C library, or `reference`."""
    isa = _forced.get() or _default_isa()
    return isa if _library(isa) is not None else REFERENCE


@contextmanager
def use_isa(isa: str) -> Iterator[None]:
    """Run CPU calls of this block on one instruction set, or on the `reference`. For tests and benchmarks."""
    check_isa(isa, "the instruction set asked for")
    token = _forced.set(isa)
    try:
        yield
    finally:
        _forced.reset(token)


@cache
def _default_isa() -> str:
    return chosen_isa()


@cache
def _library(isa: str) -> Library | None:
    if isa == REFERENCE:
        return None
    try:
        return Library(isa)
    except BuildError as error:
        # Slower by several times, but right: one line, once, is enough to find out why.
        _log.warning("nightmill kernels run as plain torch, several times slower: %s", error)
        return None
