"""What each kernel may use: committed, exact for a version of triton, so that a regression is a diff."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nightmill_kernels.check.build import KernelBuild

Key = tuple[str, str, str, int]  # triton, stem, config, arch


@dataclass(frozen=True, slots=True)
class Allowance:
    """The most a kernel may use. Spills are let in by hand only, line by line: no update writes them."""

    registers: int
    shared_bytes: int
    spills: int = 0  # bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """Allowances by version, kernel and architecture."""

    allowances: dict[Key, Allowance]

    @classmethod
    def read(cls, path: Path) -> "Budget":
        """The budget in a file; an empty one where there is no file."""
        if not path.exists():
            return cls({})
        return cls(
            {
                (triton, row["stem"], row["config"], int(row["arch"].removeprefix("sm_"))): Allowance(
                    row["registers"], row["shared_bytes"], row.get("spills", 0)
                )
                for triton, rows in json.loads(path.read_text()).items()
                for row in rows
            }
        )

    def write(self, path: Path) -> None:
        """One line an allowance, sorted: a change is a diff of the lines that changed."""
        versions: dict[str, list[str]] = {}
        for (triton, stem, config, arch), allowance in sorted(self.allowances.items()):
            row = {
                "stem": stem,
                "config": config,
                "arch": f"sm_{arch}",
                "registers": allowance.registers,
                "shared_bytes": allowance.shared_bytes,
            }
            if allowance.spills:
                row["spills"] = allowance.spills
            versions.setdefault(triton, []).append(f"    {json.dumps(row)}")
        blocks = [f"  {json.dumps(triton)}: [\n" + ",\n".join(rows) + "\n  ]" for triton, rows in versions.items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")

    def knows(self, triton: str) -> bool:
        """Whether there is a budget for a version at all."""
        return any(key[0] == triton for key in self.allowances)

    def updated(self, builds: Iterable[KernelBuild], *, is_all: bool = True) -> "Budget":
        """With what was built as the allowance.

        `is_all`: every kernel was built, so that lines of the same version and architecture without a build go.
        """
        builds = [build for build in builds if build.error is None]
        covered = {(build.triton, build.arch) for build in builds} if is_all else set()
        kept = {key: value for key, value in self.allowances.items() if (key[0], key[3]) not in covered}
        return Budget(kept | {budget_key(build): self._allowance_for(build) for build in builds})

    def spills_allowed(self, build: KernelBuild) -> int:
        """Bytes."""
        allowed = self.allowances.get(budget_key(build))
        return 0 if allowed is None else allowed.spills

    def _allowance_for(self, build: KernelBuild) -> Allowance:
        return Allowance(build.registers, build.shared_bytes, min(build.spills, self.spills_allowed(build)))


def budget_key(build: KernelBuild) -> Key:
    """Where a build's allowance stands."""
    return build.triton, build.stem, build.config, build.arch
