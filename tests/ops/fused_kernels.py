"""Prints, for each kernel that must not fuse: its name, how many fused multiply-adds it has, and approximate divisions;
last, a kernel that is built as if it might. A process of its own: kernels are compiled, not interpreted.
"""

import re
import sys
from dataclasses import replace

import triton
from triton.backends.compiler import GPUTarget

from nightmill_kernels.check.compile import spec_source
from nightmill_kernels.gpu import cut, draw
from nightmill_kernels.gpu.spec import KernelSpec


def show(spec: KernelSpec) -> None:
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": spec.enable_fp_fusion}
    built = triton.compile(spec_source(spec), target=GPUTarget("cuda", 90, 32), options=options)
    fused, divided = (len(re.findall(what, built.asm["ptx"])) for what in (r"\bfma\.", r"\bdiv\.(?:full|approx)"))
    sys.stdout.write(f"{spec.stem} {fused} {divided}\n")


# The types of the logits change loads alone.
exact = [spec for spec in (*draw.specs(), *cut.specs()) if not spec.enable_fp_fusion and "bf16" in spec.config]
for spec in exact:
    show(spec)
show(replace(exact[0], stem="fusing", enable_fp_fusion=True))
