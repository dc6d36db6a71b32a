"""Finding the kernels and their specs. Imports triton: for the worker process only."""

import importlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from types import ModuleType

from triton.runtime.jit import JITFunction

import nightmill_kernels.gpu
from nightmill_kernels.check.build import SpecKey
from nightmill_kernels.check.compile import SpecError, unwrap
from nightmill_kernels.gpu.spec import KernelSpec

SPECS = "specs"


def kernel_module_names() -> list[str]:
    """Every module of nightmill_kernels.gpu."""
    package = nightmill_kernels.gpu
    return [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]


def module_specs(module: ModuleType) -> list[KernelSpec]:
    """What a module launches; empty for a module without kernels."""
    make = getattr(module, SPECS, None)
    return [] if make is None else list(make())


def spec_keys(names: Sequence[str]) -> Iterator[SpecKey]:
    """The specs of modules, in order."""
    for name in names:
        for index, spec in enumerate(module_specs(importlib.import_module(name))):
            archs = None if spec.archs is None else sorted(spec.archs)
            yield SpecKey(
                module=name, index=index, stem=spec.stem, config=spec.config, min_arch=spec.min_arch, archs=archs
            )


def forgotten_kernels(names: Sequence[str]) -> list[str]:
    """Kernels that are in no spec and that no other kernel calls: they would never be checked.

    Raises:
        SpecError: A spec's kernel is none.
    """
    modules = [importlib.import_module(name) for name in names]
    kernels = {kernel.__name__: kernel for module in modules for kernel in _own_kernels(module)}
    listed = {unwrap(spec.kernel).__name__ for module in modules for spec in module_specs(module)}
    return sorted(
        f"{kernel.fn.__module__}.{name}"
        for name, kernel in kernels.items()
        if name not in listed and not any(_calls(other, name) for other in kernels.values() if other is not kernel)
    )


def _own_kernels(module: ModuleType) -> Iterator[JITFunction]:
    """The kernels that a module defines; what it imports is another's."""
    for value in vars(module).values():
        try:
            kernel = unwrap(value)
        except SpecError:
            continue
        if kernel.fn.__module__ == module.__name__:
            yield kernel


def _calls(kernel: JITFunction, name: str) -> bool:
    return re.search(rf"\b{name}\(", kernel.src) is not None
