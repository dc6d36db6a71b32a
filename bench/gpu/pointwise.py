"""The memory-bound operations against copy bandwidth, at the shapes of Qwen3-0.6B and Llama-3.1-8B, in bf16.

    python -m bench.gpu.pointwise [--tiny]

Bytes are those that must move: every input once, every output once. Each figure is one launch of a graph of many, over
inputs that together exceed the L2 cache. `host` is what a call costs without a graph. --tiny: small shapes in Triton's
interpreter, which shows that the script works and measures nothing.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from bench.gpu.clock import host_seconds_per_call, seconds_in_graph, seconds_of
from nightmill_kernels.argmax import argmax
from nightmill_kernels.backend import use_triton
from nightmill_kernels.gated_mul import silu_mul
from nightmill_kernels.gather_pages import gather_pages, scatter_pages
from nightmill_kernels.qk_norm_rope import HeadNorms, qk_norm_rope
from nightmill_kernels.rms_norm import add_rms_norm, rms_norm

PAGE_SIZE = 16
NUM_PAGES = 1024
MAX_LEN = 4096
CACHE_BYTES = 128 << 20
"""More than any L2 holds."""
MAX_COPIES = 48
TOKENS = (256, 8192)

Work = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a model the operations see."""

    model: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    has_norms: bool


QWEN3 = Shape(
    model="Qwen3-0.6B",
    hidden=1024,
    ffn=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocab=151_936,
    layers=28,
    has_norms=True,
)
LLAMA = Shape(
    model="Llama-3.1-8B",
    hidden=4096,
    ffn=14_336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128_256,
    layers=32,
    has_norms=False,
)
TINY = Shape(model="tiny", hidden=96, ffn=80, heads=4, kv_heads=2, head_dim=16, vocab=9000, layers=2, has_norms=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operation on one set of inputs after another."""

    name: str
    num_bytes: int  # that one call must move
    make: Callable[[], Work]  # a call with inputs of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One operation at one shape."""

    name: str
    model: str
    tokens: int
    seconds: float
    host_seconds: float
    bytes_per_s: float


def measure(device: str, shapes: tuple[Shape, ...], tokens: tuple[int, ...]) -> Iterator[Figure]:
    """Every operation at every shape."""
    for shape in shapes:
        for count in tokens:
            for case in cases(shape, count, device):
                copies = 1 if device == "cpu" else max(4, min(MAX_COPIES, CACHE_BYTES // case.num_bytes))
                works = [case.make() for _ in range(copies)]
                seconds = seconds_in_graph(works, device)
                host = host_seconds_per_call(works[0], device, calls=2 if device == "cpu" else 100)
                yield Figure(
                    name=case.name,
                    model=shape.model,
                    tokens=count,
                    seconds=seconds,
                    host_seconds=host,
                    bytes_per_s=case.num_bytes / seconds,
                )


def copy_bytes_per_s(device: str, num_bytes: int = 1 << 30) -> float:
    """Bytes read plus bytes written per second of a large copy on the device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def cases(shape: Shape, tokens: int, device: str) -> Iterator[Case]:
    """The operations of a layer and of a draw."""
    dtype = torch.float16 if device == "cpu" else torch.bfloat16

    def new(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    def norm() -> Work:
        x, weight = new(tokens, shape.hidden), new(shape.hidden)
        return lambda: rms_norm(x, weight, 1e-6)

    def add_norm() -> Work:
        x, residual, weight = new(tokens, shape.hidden), new(tokens, shape.hidden), new(shape.hidden)
        return lambda: add_rms_norm(x, residual, weight, 1e-6)

    def gate() -> Work:
        x = new(tokens, 2 * shape.ffn)
        return lambda: silu_mul(x)

    rows = min(tokens, 256)

    def choose() -> Work:
        logits = new(rows, shape.vocab)
        return lambda: argmax(logits)

    row_bytes = tokens * dtype.itemsize
    yield Case(name="rms_norm", num_bytes=2 * row_bytes * shape.hidden, make=norm)
    yield Case(name="add_rms_norm", num_bytes=4 * row_bytes * shape.hidden, make=add_norm)
    heads = 2 * (shape.heads + 2 * shape.kv_heads)  # read and written
    yield Case(name="qk_norm_rope", num_bytes=row_bytes * heads * shape.head_dim, make=_heads(shape, tokens, new))
    yield Case(name="silu_mul", num_bytes=3 * row_bytes * shape.ffn, make=gate)
    yield Case(name="argmax", num_bytes=rows * shape.vocab * dtype.itemsize, make=choose)
    yield from _pages(shape, tokens, new)


def _heads(shape: Shape, tokens: int, new: Callable[..., torch.Tensor]) -> Callable[[], Work]:
    def make() -> Work:
        sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
        q, k, v = new(tokens, sum(sizes), shape.head_dim).split_with_sizes(sizes, dim=1)
        device = q.device
        pools = new(2, NUM_PAGES, shape.kv_heads, PAGE_SIZE, shape.head_dim)
        positions = torch.randint(MAX_LEN, (tokens,), dtype=torch.int32, device=device)
        slots = torch.randperm(NUM_PAGES * PAGE_SIZE, device=device)[:tokens]
        cos_sin = torch.randn(MAX_LEN, shape.head_dim, device=device)
        norms = HeadNorms(q=new(shape.head_dim), k=new(shape.head_dim), eps=1e-6) if shape.has_norms else None
        return lambda: qk_norm_rope(q, k, v, positions, pools[0], pools[1], slots, cos_sin=cos_sin, norms=norms)

    return make


def _pages(shape: Shape, tokens: int, new: Callable[..., torch.Tensor]) -> Iterator[Case]:
    """Swap of what one sequence of `tokens` holds; the pool has twice that."""
    count, planes = max(1, tokens // PAGE_SIZE), 2 * shape.layers
    page = (shape.kv_heads, PAGE_SIZE, shape.head_dim)

    def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pool = new(planes, 2 * count, *page)
        return pool, torch.randperm(2 * count, device=pool.device)[:count], new(count, planes, *page)

    def gather() -> Work:
        pool, pages, staging = tensors()
        return lambda: gather_pages(pool, pages, staging)

    def scatter() -> Work:
        pool, pages, staging = tensors()
        return lambda: scatter_pages(staging, pages, pool)

    num_bytes = 2 * 2 * count * planes * shape.kv_heads * PAGE_SIZE * shape.head_dim
    yield Case(name="gather_pages", num_bytes=num_bytes, make=gather)
    yield Case(name="scatter_pages", num_bytes=num_bytes, make=scatter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU")
    is_tiny = parser.parse_args().tiny
    if not is_tiny and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --tiny runs the script on a CPU")
    device = "cpu" if is_tiny else "cuda"
    name = "Triton's interpreter: no figures" if is_tiny else torch.cuda.get_device_name()
    copied = copy_bytes_per_s(device, 1 << 20 if is_tiny else 1 << 30)
    print(f"{name}; copy {copied / 1e9:,.0f} GB/s read and written")
    shapes, tokens = ((TINY,), (5,)) if is_tiny else ((QWEN3, LLAMA), TOKENS)
    print(f"{'operation':14} {'model':13} {'tokens':>6} {'µs':>8} {'GB/s':>7} {'of copy':>8} {'host µs':>8}")
    with use_triton() if is_tiny else nullcontext():
        for f in measure(device, shapes, tokens):
            print(
                f"{f.name:14} {f.model:13} {f.tokens:6} {f.seconds * 1e6:8.1f} {f.bytes_per_s / 1e9:7,.0f} "
                f"{f.bytes_per_s / copied:8.1%} {f.host_seconds * 1e6:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
