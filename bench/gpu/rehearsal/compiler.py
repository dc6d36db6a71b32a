"""Launches of Triton kernels without a GPU: each is compiled as its arguments specialise it, and none runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.gpu.rehearsal.fake_tensors import FakeTensors
from nightmill_kernels.check.build import KernelBuild
from nightmill_kernels.check.compile import describe_build, spec_source, unwrap
from nightmill_kernels.check.kernel_modules import kernel_module_names, module_specs
from nightmill_kernels.gpu import device_limits

Identity = tuple[Any, ...]


class WrongDeviceError(AssertionError):
    """A kernel was given a tensor that is not on the device."""


class Launches:
    """The builds that launches asked for, each once."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self._built: dict[Identity, Any] = {}
        self._seen: set[int] = set()  # a launch finds its build by Triton's own cache: look at each build once

    def note(self, built: Any) -> None:
        """A launch with this build."""
        if id(built) not in self._seen:
            self._seen.add(id(built))
            self._built[_identity(built.src, _options(built.metadata))] = built

    def unchecked(self, checked: Mapping[Identity, str]) -> list[KernelBuild]:
        """Builds that `make kernels-check` does not make, as it would judge them."""
        return [self._describe(built) for key, built in self._built.items() if key not in checked]

    def __len__(self) -> int:
        return len(self._built)

    def _describe(self, built: Any) -> KernelBuild:
        constants = {built.src.fn.arg_names[at]: value for (at,), value in built.src.constants.items()}
        config = " ".join(f"{name}={value}" for name, value in constants.items() if value is not None)
        return describe_build(built, self.arch, stem=built.src.fn.__name__, config=config)


@contextmanager
def compiling(tensors: FakeTensors, arch: int) -> Iterator[Launches]:
    """Compile what is launched in this block for sm_`arch`. For a process of its own: Triton's driver is replaced."""
    launches = Launches(arch)
    launch = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        arguments = [(str(at), value) for at, value in enumerate(args)] + list(options.items())
        for name, value in arguments:
            if isinstance(value, Tensor) and not value.is_cuda:
                raise WrongDeviceError(f"{kernel.__name__}: argument {name} is on {value.device}")
        built = launch(kernel, *args, grid=grid, warmup=True, **options)
        launches.note(built)
        tensors.launch(kernel.__name__, [value for _, value in arguments if isinstance(value, FakeTensor)])
        return built

    driver.set_active(_Driver(arch))
    JITFunction.run, shared_limit = run, device_limits.shared_limit
    device_limits.shared_limit = lambda device: device_limits.SHARED_LIMITS[arch]  # type: ignore[assignment]
    try:
        yield launches
    finally:
        JITFunction.run, device_limits.shared_limit = launch, shared_limit


def checked_builds(arch: int) -> dict[Identity, str]:
    """What `make kernels-check` compiles for an architecture, and how it calls it."""
    specs = [spec for name in kernel_module_names() for spec in module_specs(import_module(name))]
    return {
        _identity(
            spec_source(spec), (spec.num_warps, spec.num_stages, spec.max_registers, spec.enable_fp_fusion)
        ): f"{spec.stem} [{spec.config}]"
        for spec in specs
        if spec.runs_on(arch)
    }


def _identity(source: Any, options: tuple[Any, ...]) -> Identity:
    """What decides what is compiled: the code, types, constants, alignments, options."""
    attributes = sorted((at, repr(value)) for at, value in source.attrs.items() if value)
    constants = sorted((at, repr(value)) for at, value in source.constants.items())
    code = unwrap(source.fn).cache_key
    return (code, tuple(source.signature.items()), tuple(constants), tuple(attributes), options)


def _options(metadata: Any) -> tuple[Any, ...]:
    return (metadata.num_warps, metadata.num_stages, metadata.maxnreg, metadata.enable_fp_fusion)


class _Driver:
    """What Triton asks of a driver to compile."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0
