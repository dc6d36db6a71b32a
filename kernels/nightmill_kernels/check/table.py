"""The table of builds, for a terminal or a log."""

from collections.abc import Iterable

from rich.table import Table

from nightmill_kernels.check.build import KernelBuild

_COLUMNS = ("registers", "spills", "shared", "mma", "wgmma", "tcgen05", "cp.async", "ld 128", "seconds")


def build_table(builds: Iterable[KernelBuild]) -> Table:
    """A row a build."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stem", "config", "triton", "arch"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for build in builds:
        cells = [build.registers, build.spills, build.shared_bytes, build.mma, build.wgmma, build.tcgen05]
        cells += [build.cp_async, build.loads_128]
        shown = ["–"] * len(cells) if build.error is not None else [str(cell) for cell in cells]
        table.add_row(build.stem, build.config, build.triton, f"sm_{build.arch}", *shown, f"{build.seconds:.1f}")
    return table
