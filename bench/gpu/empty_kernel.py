"""The smallest Triton kernel that does something: for what a launch costs."""

import triton
import triton.language as tl


@triton.jit
def add_one(pointer) -> None:  # type: ignore[no-untyped-def]
    """One program adds 1 to one number."""
    tl.store(pointer, tl.load(pointer) + 1.0)
