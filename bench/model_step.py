"""One step of a model with random weights: a decode batch and a prefill chunk, in ms, and where the time goes.

    python bench/model_step.py [--model DIRECTORY] [--batch 64] [--context 500] [--prefill 512] [--dtype bfloat16]
                               [--quantization int8] [--threads 2] [--repeat 20] [--sampling greedy|plain|top-p]
                               [--shared 384] [--profile]

Without --model the shape is SmolLM2-135M's. The figures are the fastest and the median of `repeat` steps: on a busy
machine only the fastest means anything, and with one thread the clock is the thread's CPU time, which other processes
disturb much less. With --shared N the decode batch's first N tokens lie in one set of pages, and the step is run with
shared-prefix attention and without in turn. --profile prints torch's operators by their own time.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.engine.groups import find_groups
from nightmill_worker.engine.step import Runner, SampleBatch, StepPlan
from nightmill_worker.model_recipe import ModelRecipe

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}
SAMPLING = {"greedy": (0.0, 0, 1.0), "plain": (1.0, 0, 1.0), "top-k": (0.8, 50, 1.0), "top-p": (0.8, 0, 0.95)}


def build(options: argparse.Namespace) -> Runner:
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model or Path(scratch)
        if options.model is None:
            (directory / "config.json").write_text(json.dumps(SMOLLM2_135M))
        longest = max(options.context, options.prefill) + 1
        spec = ModelSpec(
            model="dummy",
            dtype=options.dtype,
            quantization=options.quantization,
            load_format="dummy",
            max_model_len=longest,
        )
        engine = EngineOptions(num_threads=options.threads, pool_bytes=options.pool_mib << 20)
        return ModelRecipe(directory=directory, spec=spec, options=engine).build()


def plan(runner: Runner, sequences: int, query: int, context: int, sampling: str, shared: int = 0) -> StepPlan:
    """`sequences` with `query` new tokens each, the last of which stands at the end of `context` tokens.

    The full pages of the first `shared` tokens are those of the first sequence.
    """
    page_size = runner.pool.page_size
    width = -(-context // page_size)
    if sequences * width >= runner.pool.num_pages:
        sys.exit(f"the pool has {runner.pool.num_pages} pages, {sequences * width} are needed: raise --pool-mib")
    generator = np.random.default_rng(0)
    tables = (generator.permutation(sequences * width) + 1).reshape(sequences, width).astype(np.int32)
    tables[:, : shared // page_size] = tables[0, : shared // page_size]
    positions = np.arange(context - query, context)
    slots = tables[:, positions // page_size].astype(np.int64) * page_size + positions % page_size
    temperature, top_k, top_p = SAMPLING[sampling]

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(sequences, value, dtype)

    return StepPlan(
        step=0,
        token_ids=generator.integers(0, runner.vocab_size, sequences * query).astype(np.int32),
        positions=np.tile(positions, sequences).astype(np.int32),
        slots=slots.reshape(-1),
        query_starts=np.arange(sequences + 1, dtype=np.int32) * query,
        context_lens=full(context, np.int32),
        page_tables=tables,
        sample=SampleBatch(
            sequence=np.arange(sequences, dtype=np.int32),
            token_index=(np.arange(1, sequences + 1) * query - 1).astype(np.int32),
            position=full(context, np.int64),
            seed=np.arange(sequences, dtype=np.uint64),
            temperature=full(temperature, np.float32),
            top_k=full(top_k, np.int32),
            top_p=full(top_p, np.float32),
            min_p=full(0, np.float32),
            presence_penalty=full(0, np.float32),
            frequency_penalty=full(0, np.float32),
            repetition_penalty=full(1, np.float32),
            num_logprobs=full(-1, np.int32),
            any_random=temperature > 0,
        ),
    )


def measure(run: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Fastest and median ms; with one thread its CPU time."""
    import torch

    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    times = []
    for _ in range(repeat):
        start = clock()
        run()
        times.append((clock() - start) * 1e3)
    return min(times), statistics.median(times)


def compare_shared(runner: Runner, options: argparse.Namespace) -> None:
    """The decode step with and without groups, in turn."""
    off = plan(runner, options.batch, 1, options.context, options.sampling, options.shared)
    counts = np.ones(options.batch, np.int64)
    on = replace(off, groups=find_groups(off.page_tables, off.context_lens, counts, runner.pool.page_size))
    if on.groups is None:
        sys.exit("nothing is worth sharing: raise --shared or --batch")
    times: dict[str, list[float]] = {"on": [], "off": []}
    for _ in range(options.repeat):
        for name, step in (("off", off), ("on", on)):
            times[name].append(measure(lambda step=step: runner.run(step), 1)[0])  # type: ignore[misc]
    ratio = min(times["off"]) / min(times["on"])
    for name, ms in times.items():
        print(
            f"decode   {options.batch}×1 at {options.context}, {options.shared} shared, shared attention {name:3}: "
            f"{min(ms):7.2f} ms (median {statistics.median(ms):.2f})"
        )
    print(
        f"ratio    {ratio:.3f} by the fastest, {statistics.median(times['off']) / statistics.median(times['on']):.3f}"
        " by the medians"
    )


def print_operators(runner: Runner, step: StepPlan) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(3):
            runner.run(step)
    print(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=44))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory with config.json; default: SmolLM2-135M's shape")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=["int8"], default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--pool-mib", type=int, default=2048)
    parser.add_argument("--sampling", choices=SAMPLING, default="greedy")
    parser.add_argument("--shared", type=int, default=0, help="tokens that the decode batch has in common")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    runner = build(options)  # as the engine process does: it decides how torch's threads wait, then loads torch
    import torch

    from nightmill_kernels.backend import active_isa

    steps = {
        "decode": (options.batch, 1, options.context),
        "prefill": (1, options.prefill, options.prefill),
    }
    weights = "" if options.quantization is None else f", {options.quantization} weights"
    print(f"{active_isa()} kernels{weights}, {torch.get_num_threads()} threads, {torch.__version__}")
    for name, (sequences, query, context) in steps.items():
        step = plan(runner, sequences, query, context, options.sampling)
        fastest, median = measure(lambda step=step: runner.run(step), options.repeat)  # type: ignore[misc]
        rate = sequences * query / fastest * 1e3
        print(f"{name:8} {sequences}×{query} at {context}: {fastest:7.2f} ms (median {median:.2f}), {rate:,.0f} tok/s")
        if options.profile:
            print_operators(runner, step)
    if options.shared:
        compare_shared(runner, options)


if __name__ == "__main__":
    main()
