"""Draws on a GPU: µs per step for every kind of row, against one read of the logits at copy bandwidth.

    python -m bench.gpu.draw [--tiny]

`model` logits fall off as a language model's do, `flat` ones are all nearly alike: the worst case for filters. Each
figure is a draw in a graph of several over inputs that together exceed the L2 cache; `host` is what the launches cost
without one. --tiny: small shapes in Triton's interpreter, ids compared with the reference, no figures.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch
from torch import Tensor

from bench.draw import KINDS, rows_of
from bench.gpu.clock import host_seconds_per_call, seconds_in_graph, seconds_of
from nightmill_kernels.backend import use_isa, use_triton
from nightmill_kernels.cpu.isa import REFERENCE
from nightmill_kernels.draw import DrawRows, draw

FULL = ((256, 151_936), (256, 128_256), (1, 151_936))
TINY = ((4, 1100),)
COPIES = 4
CHECKED = 8  # rows whose ids are compared with the reference, on the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One kind of rows at one shape."""

    logits: str
    kind: str
    rows: int
    vocab: int
    seconds: float
    host_seconds: float
    bytes_per_s: float  # of one read of the logits
    same_ids: bool  # as the reference draws


def measure(device: str, shapes: tuple[tuple[int, int], ...] = FULL) -> Iterator[Figure]:
    """Every kind of rows on both kinds of logits."""
    is_tiny = device == "cpu"
    for rows, vocab in shapes:
        for name in ("model", "flat"):
            inputs = [logits_of(name, rows, vocab, device) for _ in range(1 if is_tiny else COPIES)]
            for kind in KINDS:
                yield _figure(name, kind, inputs, is_tiny=is_tiny)


def _figure(name: str, kind: str, inputs: list[Tensor], *, is_tiny: bool) -> Figure:
    rows, vocab = inputs[0].shape
    here = rows_of(kind, rows)
    names = DrawRows.__dataclass_fields__
    there = DrawRows(**{field: getattr(here, field).to(inputs[0].device) for field in names})
    has_filters = kind in ("top-k", "top-p", "both")
    works = [lambda logits=logits: draw(logits, there, has_filters=has_filters) for logits in inputs]
    found = works[0]()[:CHECKED].tolist()
    with use_isa(REFERENCE):
        checked = here.at(torch.arange(min(rows, CHECKED)))
        expected = draw(inputs[0][:CHECKED].cpu(), checked).tolist()
    device = inputs[0].device.type
    seconds = seconds_in_graph(works, device)
    return Figure(
        logits=name,
        kind=kind,
        rows=rows,
        vocab=vocab,
        seconds=seconds,
        host_seconds=host_seconds_per_call(works[0], device, calls=2 if is_tiny else 50),
        bytes_per_s=inputs[0].nbytes / seconds,
        same_ids=found == expected,
    )


def logits_of(name: str, rows: int, vocab: int, device: str) -> Tensor:
    """Of 151,936 `model` logits the largest stands some 20 above the median."""
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # the interpreter has no bf16 arithmetic
    if name == "flat":
        return torch.randn(rows, vocab, device=device).mul_(0.1).to(dtype)
    noise = torch.rand(rows, vocab, device=device).clamp_(1e-9, 1 - 1e-7)
    return noise.log_().neg_().log_().neg_().mul_(2.0).to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU")
    is_tiny = parser.parse_args().tiny
    if not is_tiny and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --tiny runs the script on a CPU")
    device = "cpu" if is_tiny else "cuda"
    print("Triton's interpreter: no figures" if is_tiny else torch.cuda.get_device_name())
    source = torch.empty(1 << 20 if is_tiny else 1 << 30, dtype=torch.uint8, device=device)
    copied = 2 * source.nbytes / seconds_of(lambda: torch.empty_like(source).copy_(source), device)
    print(f"copy {copied / 1e9:,.0f} GB/s read and written")
    print(f"{'logits':6} {'kind':6} {'rows':>4} {'vocab':>7} {'µs':>8} {'floor µs':>8} {'host µs':>8}")
    with use_triton() if is_tiny else nullcontext():
        for f in measure(device, TINY if is_tiny else FULL):
            floor = f.seconds * f.bytes_per_s / copied
            print(
                f"{f.logits:6} {f.kind:6} {f.rows:4} {f.vocab:7} {f.seconds * 1e6:8.1f} {floor * 1e6:8.1f} "
                f"{f.host_seconds * 1e6:8.1f}   {'same ids' if f.same_ids else 'IDS DIFFER'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
