"""What continuous batching gains over static batches, by how unequal the answers are: a table and a picture.

`python bench/simulate/length_variance.py [--requests 4096] [--max-num-seqs 64] [--plot gain.png] [--json gain.json]`

Every mix has the same number of requests with the same prompts; only the answers differ, from all alike (nothing to
gain) to 5…2,000 tokens (the gain tends to longest / mean). `ceiling` is that limit for the mix's own draws: the mean
over static groups of the longest answer, over the mean answer.
"""

import json
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from nightmill_worker.engine.options import Policy
from nightmill_worker.simulate.cost_model import DEVICES, MODELS, CostModel
from nightmill_worker.simulate.plot import pyplot
from nightmill_worker.simulate.simulation import Simulation, SimulationOptions
from nightmill_worker.simulate.trace import Trace

PROMPT = 64


def mixes(requests: int, rng: np.random.Generator) -> dict[str, NDArray[np.int64]]:
    """Answer lengths by name, from equal to very unequal."""
    log_wide = np.exp(rng.uniform(np.log(5), np.log(2000), requests))
    found = {
        "all 200": np.full(requests, 200.0),
        "150-250": rng.uniform(150, 250, requests),
        "20-380": rng.uniform(20, 380, requests),
        "lognormal, sigma 0.5": np.minimum(rng.lognormal(np.log(170), 0.5, requests), 2000),
        "exponential": np.minimum(rng.exponential(200, requests), 2000),
        "5-2000, log-uniform": log_wide,
        "9 of 10 short, 1 of 10 2000": np.where(rng.random(requests) < 0.1, 2000.0, 20.0),
    }
    return {name: np.maximum(1, np.rint(lengths)).astype(np.int64) for name, lengths in found.items()}


@click.command()
@click.option("--requests", default=4096, show_default=True)
@click.option("--max-num-seqs", default=64, show_default=True)
@click.option("--model", type=click.Choice(sorted(MODELS)), default="qwen3-0.6b", show_default=True)
@click.option("--device", type=click.Choice(sorted(DEVICES)), default="h200", show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), default=None)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
def main(requests: int, max_num_seqs: int, model: str, device: str, plot: Path | None, json_path: Path | None) -> None:
    """Simulate each mix under both policies."""
    options = SimulationOptions(cost=CostModel(DEVICES[device], MODELS[model]), max_num_seqs=max_num_seqs)
    points = []
    click.echo(f"{'answers':30} {'cv':>5} {'steps':>15} {'gain':>6} {'ceiling':>8} {'in seconds':>11}")
    for name, lengths in mixes(requests, np.random.default_rng(0)).items():
        trace = Trace.of_lengths([(PROMPT, int(length)) for length in lengths])
        static, continuous = (Simulation(trace, options, p).run().recorder for p in (Policy.STATIC, Policy.CONTINUOUS))
        groups = [lengths[i : i + max_num_seqs].max() for i in range(0, requests, max_num_seqs)]
        point = {
            "answers": name,
            "cv": float(lengths.std() / lengths.mean()),
            "static_steps": static.steps,
            "continuous_steps": continuous.steps,
            "gain_steps": static.steps / continuous.steps,
            "ceiling": float(np.mean(groups) / lengths.mean()),
            "gain_seconds": static.clock_s / continuous.clock_s,
        }
        points.append(point)
        steps = f"{static.steps} / {continuous.steps}"
        click.echo(
            f"{name:30} {point['cv']:5.2f} {steps:>15} {point['gain_steps']:6.2f} "
            f"{point['ceiling']:8.2f} {point['gain_seconds']:11.2f}"
        )
    if json_path is not None:
        json_path.write_text(json.dumps(points, indent=2) + "\n")
    if plot is not None:
        draw(plot, points)


def draw(path: Path, points: list[dict[str, float]]) -> None:
    """Gain over the answers' coefficient of variation."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    points = sorted(points, key=lambda point: point["cv"])
    x = [point["cv"] for point in points]
    axes.plot(x, [point["ceiling"] for point in points], "--", color="#999999", label="longest of a group / mean")
    axes.plot(x, [point["gain_steps"] for point in points], "o-", color="#1b6ca8", label="gain in steps")
    axes.plot(x, [point["gain_seconds"] for point in points], "s-", color="#c0392b", label="gain in seconds")
    axes.set_xlabel("standard deviation / mean of the answers' lengths")
    axes.set_ylabel("static / continuous")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
