"""Linear layers on this CPU: our packed product against oneDNN's, weights read from memory.

    python bench/linear.py [--threads N] [--dtype bfloat16|float32] [--rows 1,8,64,512] [--isa NAME]... [--layers 30]
                           [--repeat N] [--head]

Shapes are those of SmolLM2-135M's layers (qkv 960×576, out 576×576, gate and up 3072×576, down 576×1536); all layers of
one way are gone through before the next, so that no weight is in a cache that would not be in a step of the model
(30 layers are 212 MB in bf16). --head: the output projection, 49152×576, instead. Figures are the best of `repeat`
rounds, all ways in turn in each, so that a busy machine hurts them alike; with one thread the clock is the thread's CPU
time. oneDNN takes its instruction set from ONEDNN_MAX_CPU_ISA (AVX2, AVX512_CORE, …), which has to be set before.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nightmill_kernels.backend import library_for, use_isa
from nightmill_kernels.cpu.isa import available_isas
from nightmill_kernels.linear import PackedLinear
from nightmill_worker.model import linear as model_linear

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = ((49152, 576),)
Multiply = Callable[[Tensor], Tensor]


def ours(isa: str) -> Callable[[Tensor], Multiply]:
    def make(weight: Tensor) -> Multiply:
        with use_isa(isa):
            library = library_for(weight)
        assert library is not None, f"the {isa} library did not build: see the warning in the log"
        return PackedLinear(library, weight, None, None)

    return make


def onednn(weight: Tensor) -> Multiply:
    if not model_linear._can_pack("cpu", weight.dtype):
        return lambda x: F.linear(x, weight)
    packed = model_linear._pack(weight)
    return lambda x: model_linear._packed_linear(x, packed, None)


def measure(ways: dict[str, list[list[Multiply]]], inputs: list[Tensor], repeat: int) -> dict[str, float]:
    """Seconds of the fastest round of each."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeat):
        for name, layers in ways.items():
            start = clock()
            for layer in layers:
                for multiply, x in zip(layer, inputs, strict=True):
                    multiply(x)
            best[name] = min(best[name], clock() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", default="1,8,64,512")
    parser.add_argument("--isa", action="append", choices=available_isas(), help="default: the best")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--head", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    shapes, layers = (HEAD, 1) if options.head else (LAYER, options.layers)
    makers = {isa: ours(isa) for isa in options.isa or available_isas()[:1]} | {"onednn": onednn}
    generator = torch.Generator().manual_seed(0)
    weights = [[torch.randn(*shape, generator=generator).to(dtype) * 0.05 for shape in shapes] for _ in range(layers)]
    ways = {name: [[make(weight) for weight in layer] for layer in weights] for name, make in makers.items()}
    num_bytes = sum(weight.nbytes for layer in weights for weight in layer)
    del weights
    print(
        f"{options.dtype}, {options.threads} threads, {num_bytes / 1e6:.0f} MB of weights, torch {torch.__version__}, "
        f"ONEDNN_MAX_CPU_ISA={os.environ.get('ONEDNN_MAX_CPU_ISA', '')}"
    )
    for rows in map(int, options.rows.split(",")):
        inputs = [torch.randn(rows, shape[1], generator=generator).to(dtype) for shape in shapes]
        with torch.inference_mode():
            found = measure(ways, inputs, options.repeat)
        for name, seconds in found.items():
            flops = 2 * rows * num_bytes / dtype.itemsize / seconds
            print(
                f"{rows:5} rows  {name:12} {seconds * 1e3:8.2f} ms  {flops / 1e9:6.0f} GFLOP/s  "
                f"{num_bytes / seconds / 1e9:5.1f} GB/s  {found['onednn'] / seconds:.2f}×"
            )


if __name__ == "__main__":
    main()
