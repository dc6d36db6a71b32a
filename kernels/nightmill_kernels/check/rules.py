"""What is refused: one finding a line, with what was found, what is allowed and what to do."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from nightmill_kernels.check.budget import Budget, budget_key
from nightmill_kernels.check.build import KernelBuild
from nightmill_kernels.check.farm import Catalogue
from nightmill_kernels.gpu.device_limits import SHARED_LIMITS

UPDATE = "`make kernels-check UPDATE=1` rewrites the budget"


def check_builds(builds: Iterable[KernelBuild], budget: Budget) -> Iterator[str]:
    """What is wrong with builds."""
    for build in builds:
        if build.error is not None:
            yield f"{build.name}: does not compile: {build.error}"
            continue
        yield from check_hardware(build, budget.spills_allowed(build))
        yield from _check_budget(build, budget)


def check_catalogue(catalogue: Catalogue) -> Iterator[str]:
    """What is wrong with the specs themselves."""
    if not catalogue.specs:
        yield "no spec was found: each module of nightmill_kernels.gpu lists its own in specs()"
    for name in catalogue.forgotten:
        yield f"{name}: a kernel in no spec is never checked; name its configurations in the module's specs()"
    names = Counter(
        (key.stem, key.config, arch) for key in catalogue.specs for arch in SHARED_LIMITS if key.runs_on(arch)
    )
    counts = {(stem, config): count for (stem, config, _), count in names.items() if count > 1}
    for (stem, config), count in counts.items():
        yield f"{stem} [{config}]: {count} specs have this name; a config's name is unique for its stem"


def gone_lines(builds: Sequence[KernelBuild], budget: Budget) -> Iterator[str]:
    """Lines of the budget whose kernels were not among the builds, for versions and architectures that were built."""
    covered, built = {(build.triton, build.arch) for build in builds}, {budget_key(build) for build in builds}
    for key in sorted(budget.allowances.keys() - built):
        triton, stem, config, arch = key
        if (triton, arch) in covered:
            yield f"{stem} [{config}] for sm_{arch} by triton {triton}: in the budget, but in no spec; {UPDATE}"


def unknown_versions(builds: Iterable[KernelBuild], budget: Budget) -> list[str]:
    """Versions of triton that the budget says nothing of: their registers and shared memory are not compared."""
    return sorted({build.triton for build in builds if not budget.knows(build.triton)})


def check_hardware(build: KernelBuild, spills_allowed: int) -> Iterator[str]:
    """What an architecture refuses, or makes slow."""
    if build.spills > spills_allowed:
        yield (
            f"{build.name}: spills {build.spills} bytes ({build.registers} registers); allowed is {spills_allowed}: "
            "smaller tiles, or more warps"
        )
    if build.wants_tensor_cores and not build.mma + build.wgmma + build.tcgen05:
        yield (
            f"{build.name}: no tensor-core instruction (mma.sync, wgmma, tcgen05), and its spec wants some: "
            "give tl.dot operands of 16 bits and at least 16 rows and columns"
        )
    limit = SHARED_LIMITS.get(build.arch)
    if limit is None:
        yield f"{build.name}: the shared memory of sm_{build.arch} is not known: add it to SHARED_LIMITS"
    elif build.shared_bytes > limit:  # it compiles, and fails at its launch
        yield (
            f"{build.name}: {build.shared_bytes} bytes of shared memory; a block of sm_{build.arch} has {limit}: "
            "fewer stages, or smaller tiles"
        )


def _check_budget(build: KernelBuild, budget: Budget) -> Iterator[str]:
    if not budget.knows(build.triton):
        return
    allowed = budget.allowances.get(budget_key(build))
    if allowed is None:
        yield f"{build.name}: not in the budget; {UPDATE}, and the diff is for review"
        return
    for what, found, most in (
        ("registers", build.registers, allowed.registers),
        ("bytes of shared memory", build.shared_bytes, allowed.shared_bytes),
    ):
        if found > most:
            yield f"{build.name}: {found} {what}, the budget allows {most}; if that is worth it, {UPDATE}"
