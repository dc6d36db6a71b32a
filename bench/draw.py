"""Drawing tokens on this CPU: ms per step for every kind of row, the C kernel against the torch reference.

    python bench/draw.py [--threads N] [--batch 64] [--vocab 49152] [--repeat 9] [--isa NAME]...

`model` logits fall off as a language model's do (Gumbel-like, a few likely tokens above a long tail); `flat` ones are
all nearly alike, the worst case for filters and for the search. All ways in turn in each round; the best and the median
of `repeat` rounds: compare ratios, not absolutes.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nightmill_kernels.backend import active_isa, use_isa
from nightmill_kernels.draw import DrawRows, draw

KINDS = {  # temperature, min_p, top_k, top_p
    "greedy": (0.0, 0.0, 0, 1.0),
    "plain": (1.0, 0.0, 0, 1.0),
    "min-p": (1.0, 0.05, 0, 1.0),
    "top-k": (0.8, 0.0, 50, 1.0),
    "top-p": (0.8, 0.0, 0, 0.95),
    "both": (0.8, 0.0, 50, 0.95),
}


def logits_of(shape: str, batch: int, vocab: int) -> Tensor:
    noise = torch.rand(batch, vocab).clamp_(1e-9, 1 - 1e-7)
    if shape == "flat":
        return torch.randn(batch, vocab).mul_(0.1).bfloat16()
    return noise.log().neg().log().neg().mul_(2.0).bfloat16()  # the largest of 49,152 stands some 10 above the median


def rows_of(kind: str, batch: int) -> DrawRows:
    temperature, min_p, top_k, top_p = KINDS[kind]
    return DrawRows(
        temperature=torch.full((batch,), temperature),
        min_p=torch.full((batch,), min_p),
        top_k=torch.full((batch,), top_k, dtype=torch.int32),
        top_p=torch.full((batch,), top_p),
        seed=torch.arange(batch),
        position=torch.full((batch,), 500),
    )


def call(logits: Tensor, rows: DrawRows, isa: str) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with use_isa(isa):
            return draw(logits, rows)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--isa", action="append", help="instruction sets to time (default: the best one)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    isas = [*(options.isa or [active_isa()]), "reference"]
    print(f"{options.threads} threads, {options.batch} rows of {options.vocab}, best (median) ms of {options.repeat}")
    for shape in ("model", "flat"):
        logits = logits_of(shape, options.batch, options.vocab)
        for kind in KINDS:
            ways = {isa: call(logits, rows_of(kind, options.batch), isa) for isa in isas}
            answers = {isa: way() for isa, way in ways.items()}
            same = all(torch.equal(answer, answers["reference"]) for answer in answers.values())
            times: dict[str, list[float]] = {isa: [] for isa in isas}
            for _ in range(options.repeat):
                for isa, way in ways.items():
                    start = time.perf_counter()
                    way()
                    times[isa].append((time.perf_counter() - start) * 1e3)
            figures = "   ".join(f"{isa} {min(ms):7.2f} ({statistics.median(ms):7.2f})" for isa, ms in times.items())
            print(f"{shape:5s} {kind:6s} {figures}   {'same ids' if same else 'IDS DIFFER'}")


if __name__ == "__main__":
    main()
