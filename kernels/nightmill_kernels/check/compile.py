"""Compiling one kernel for a GPU that is not here, and reading the result. Imports triton: for the worker process only.

The wheel of triton brings ptxas and cuobjdump; no driver and no toolkit is asked for.
"""

import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from nightmill_kernels.check.build import KernelBuild
from nightmill_kernels.gpu.spec import KernelSpec

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_LOAD_128 = re.compile(r"\bld\.global\S*\.(?:v4\.[bfus]32|v2\.[bfus]64)\b")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class SpecError(ValueError):
    """A KernelSpec that does not fit its kernel."""


def compile_spec(spec: KernelSpec, arch: int) -> KernelBuild:
    """Compile for sm_`arch` as a launch with the spec's constants would. What goes wrong is in the build's `error`."""
    facts: dict[str, Any] = {
        "stem": spec.stem,
        "config": spec.config,
        "wants_tensor_cores": spec.wants_tensor_cores,
    }
    started = time.perf_counter()
    try:
        source = spec_source(spec)
        options = {
            "num_warps": spec.num_warps,
            "num_stages": spec.num_stages,
            "enable_fp_fusion": spec.enable_fp_fusion,
            "maxnreg": spec.max_registers,
        }
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # noqa: BLE001  # whatever a compiler throws is this row's result, not ours
        seconds = time.perf_counter() - started
        return KernelBuild(**facts, triton=triton.__version__, arch=arch, seconds=seconds, error=_last_lines(error))
    return describe_build(built, arch, **facts, seconds=time.perf_counter() - started)


def describe_build(built: Any, arch: int, **facts: Any) -> KernelBuild:
    """What Triton's CompiledKernel for sm_`arch` uses. `facts`: the fields of the result that it cannot know."""
    ptx: str = built.asm["ptx"]
    used = _resources(built.asm["cubin"])
    stack = max(used["STACK"], used["LOCAL"])
    return KernelBuild(
        **facts,
        triton=triton.__version__,
        arch=arch,
        registers=used["REG"],
        spills=max(stack, _spilled_bytes(ptx, arch)) if stack else 0,
        # Triton takes shared memory at the launch; what the object itself names comes on top.
        shared_bytes=built.metadata.shared + used["SHARED"],
        mma=ptx.count("mma.sync"),
        wgmma=ptx.count("wgmma.mma_async"),
        tcgen05=ptx.count("tcgen05.mma"),
        cp_async=ptx.count("cp.async.cg") + ptx.count("cp.async.ca") + ptx.count("cp.async.bulk"),
        loads_128=len(_LOAD_128.findall(ptx)),
    )


def unwrap(kernel: Any) -> JITFunction:
    """The function under an autotuner's or a heuristic's decorator.

    Raises:
        SpecError: There is none: not a kernel, or one of the interpreter's.
    """
    while not isinstance(kernel, JITFunction):
        inner = getattr(kernel, "fn", None)
        if inner is None or type(kernel).__name__ == "InterpretedFunction":
            raise SpecError(f"{kernel!r} is no @triton.jit function of this process (is TRITON_INTERPRET set?)")
        kernel = inner
    return kernel


def spec_source(spec: KernelSpec) -> ASTSource:
    """What the compiler is given.

    Raises:
        SpecError: The spec names other arguments than the kernel has.
    """
    kernel = unwrap(spec.kernel)
    known, named = set(kernel.arg_names), {*spec.signature, *spec.constants}
    if known != named or set(spec.signature) & set(spec.constants):
        raise SpecError(
            f"the spec and {kernel.__name__} disagree about arguments: only the kernel has {sorted(known - named)}, "
            f"only the spec {sorted(named - known)}, twice {sorted(set(spec.signature) & set(spec.constants))}"
        )
    if not spec.divisible <= set(spec.signature):
        raise SpecError(f"divisible names no argument: {sorted(spec.divisible - set(spec.signature))}")
    names = kernel.arg_names
    return ASTSource(
        fn=kernel,
        signature={name: spec.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in spec.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in spec.divisible},
    )


def _resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL of the one kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _tool([str(_CUOBJDUMP), "--dump-resource-usage", file.name])
    found = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text))
    return {name: int(found[name]) for name in ("REG", "STACK", "SHARED", "LOCAL")}


def _spilled_bytes(ptx: str, arch: int) -> int:
    """Bytes of spill stores and loads as ptxas counts them."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None, "PTX without a target"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.ptx"
        path.write_text(ptx)
        text = _tool([get_ptxas(arch).path, "-v", f"--gpu-name={target[1]}", str(path), "-o", "/dev/null"])
    return sum(int(stores) + int(loads) for _, stores, loads in _SPILLS.findall(text))


def _tool(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _last_lines(error: Exception) -> str:
    """Compilers put the reason last, under pages of source."""
    lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return "\n".join(lines[:1] + lines[1:][-3:])[-600:]
