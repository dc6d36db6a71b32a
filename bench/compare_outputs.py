"""Compare two output folders of one job: `python bench/compare_outputs.py OUT_A OUT_B`. Exit 1 when they differ."""

import sys
from pathlib import Path

from nightmill_worker.bench.output_comparison import compare_outputs


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    result = compare_outputs(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{result.num_rows} rows; columns that differ: {', '.join(result.differing_columns) or 'none'}")
    print(result.completions)
    return 1 if result.differing_columns or result.completions.failures else 0


if __name__ == "__main__":
    sys.exit(main())
