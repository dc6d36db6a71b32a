"""What a row costs in jobs of more and more rows: whole `nightmill run`s, Parquet in and out, of W1's shape.

    python -m bench.rows_flat [--rows 1000,10000,100000] [--model small|demo|DIRECTORY] [--limit-s 1800] [--json FILE]

384 shared tokens as the system prompt, 16–96 own ones, 8–64 generated; the real tokenizer, the real engine process.
`small` is a Llama of 2 layers of 64 with random weights and the demo model's tokenizer: what is left is what the host
costs, and 100,000 rows take minutes. Each job runs in a process of its own. Flat means: no column grows from line to
line, and `last/first` (seconds per row in the last fifth of the rows over those in the second fifth) is about 1.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from nightmill.config import Settings
from nightmill.records import EngineOptions, JobOptions, JobSpec, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill_worker.bench.machine import this_machine
from nightmill_worker.bench.workload import corpus_ids, shared_prompt_rows
from nightmill_worker.drain import Drain
from nightmill_worker.embedded import EmbeddedRun, RunOptions
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.loaded_model import load_model
from nightmill_worker.model.source import resolve_model
from nightmill_worker.report import RunProgress

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SEED = 20261129
SHARED_TOKENS = 384
POOL_BYTES = {"small": 16 << 20, "real": 512 << 20}  # enough for 64 rows; what is cached fills it soon in any job
STAGES = ("plan", "load", "rows", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """How far a run was at one time."""

    at_s: float
    rows: int
    feeder_cpu_s: float
    engine_cpu_s: float
    feeder_rss: int  # bytes
    engine_rss: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One job."""

    rows: int
    seconds: dict[str, float]  # by stage
    feeder_cpu_s: dict[str, float]  # by stage
    engine_cpu_s: float  # with loading
    feeder_peak_rss: int  # bytes
    engine_peak_rss: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    steps: int
    output_bytes: int
    moments: list[Moment]  # while rows ran


class Recorder:
    """A Reporter that keeps the time of what it is told."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.marks: dict[str, tuple[float, float]] = {}  # begin of a stage: seconds, feeder's CPU seconds
        self.moments: list[Moment] = []
        self._engine: psutil.Process | None = None

    def phase(self, text: str) -> None:
        if text == "planning":
            self.mark("plan")
        elif text.startswith("loading"):
            self.mark("load")

    def note(self, text: str) -> None:
        """The first one is about the loaded model."""

    def progress(self, progress: RunProgress) -> None:
        if not self.moments:
            self.mark("rows")
        self.moments.append(self._moment(progress.rows_completed + progress.rows_failed))
        self.mark("close")  # what comes after the last look: looks are 0.2 s apart

    def mark(self, stage: str) -> None:
        self.marks[stage] = (time.monotonic() - self.started, _cpu_s(RUSAGE_SELF))

    def _moment(self, rows: int) -> Moment:
        own = psutil.Process()
        engine = self._find_engine(own)
        with (engine or own).oneshot():
            times, rss = (engine or own).cpu_times(), (engine or own).memory_info().rss
        return Moment(
            at_s=time.monotonic() - self.started,
            rows=rows,
            feeder_cpu_s=_cpu_s(RUSAGE_SELF),
            engine_cpu_s=times.user + times.system if engine else 0.0,
            feeder_rss=own.memory_info().rss,
            engine_rss=rss if engine else 0,
        )

    def _find_engine(self, own: psutil.Process) -> psutil.Process | None:
        if self._engine is None or not self._engine.is_running():
            children = own.children()
            self._engine = max(children, key=lambda child: child.memory_info().rss, default=None)
        return self._engine


def _cpu_s(who: int) -> float:
    usage = getrusage(who)
    return usage.ru_utime + usage.ru_stime


def write_input(path: Path, tokenizer: Tokenizer, rows: int) -> str:
    """Write `rows` prompts and return the system prompt they share."""
    corpus = corpus_ids(lambda text: tokenizer.encode(text, add_special_tokens=False))
    rng = random.Random(SEED)
    system = corpus[1000 : 1000 + SHARED_TOKENS]
    schema = pa.schema([("prompt", pa.string()), ("sampling_params", pa.struct([("max_tokens", pa.int32())]))])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, 10_000):
            made = shared_prompt_rows(corpus, rng, system, min(10_000, rows - start))
            prompts = [tokenizer.decode(row.prompt_ids[SHARED_TOKENS:]) for row in made]
            limits = [{"max_tokens": row.max_tokens} for row in made]
            writer.write_table(pa.table({"prompt": prompts, "sampling_params": limits}, schema=schema))
    return tokenizer.decode(system)


def run_one(directory: Path, rows: int, threads: int | None, scratch: Path) -> Figures:
    """The whole job in this process, as `nightmill run` does it, timed by stages."""
    is_small = not any(directory.glob("*.safetensors"))
    model = ModelSpec(model=str(directory), load_format="dummy" if is_small else "auto")
    engine = EngineOptions(pool_bytes=POOL_BYTES["small" if is_small else "real"], num_threads=threads)
    loaded = load_model(model, engine, progress=lambda _: None)
    system = write_input(scratch / "in.parquet", loaded.tokenizer, rows)
    spec = JobSpec(
        inputs=(str(scratch / "in.parquet"),),
        output=str(scratch / "out"),
        model=model,
        sampling=SamplingParams(ignore_eos=True),
        system_prompt=system,
    )
    settings = Settings.from_env({"HOME": str(scratch), "NIGHTMILL_HOME": str(scratch / "home")})
    recorder, before = Recorder(), _cpu_s(RUSAGE_CHILDREN)
    embedded = EmbeddedRun(loaded, RunOptions(engine=engine), settings, recorder, Drain())
    result = embedded.run(spec, JobOptions())
    recorder.mark("end")
    if result.summary.rows_ok != rows:
        raise RuntimeError(f"{rows - result.summary.rows_ok} of {rows} rows failed: {result.summary.error_codes}")
    return Figures(
        rows=rows,
        seconds=_differences(recorder, 0),
        feeder_cpu_s=_differences(recorder, 1),
        engine_cpu_s=_cpu_s(RUSAGE_CHILDREN) - before,
        feeder_peak_rss=getrusage(RUSAGE_SELF).ru_maxrss * 1024,
        engine_peak_rss=getrusage(RUSAGE_CHILDREN).ru_maxrss * 1024,
        prompt_tokens=result.summary.prompt_tokens,
        cached_tokens=result.summary.cached_tokens,
        completion_tokens=result.summary.completion_tokens,
        steps=result.summary.steps,
        output_bytes=sum(path.stat().st_size for path in (scratch / "out").rglob("*") if path.is_file()),
        moments=recorder.moments,
    )


def _differences(recorder: Recorder, which: int) -> dict[str, float]:
    names = (*STAGES, "end")
    return {a: recorder.marks[b][which] - recorder.marks[a][which] for a, b in pairwise(names)}


def make_small(directory: Path, tokenizer_from: Path) -> Path:
    """A model without weights: `--load-format dummy` makes them."""
    directory.mkdir()
    for path in tokenizer_from.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copy(path, directory)
    (directory / "config.json").write_text(json.dumps(SMALL))
    return directory


def last_over_first(moments: list[Moment], read: Callable[[Moment], float]) -> float:
    """Cost per row in the last fifth of the rows over that in the second fifth: the first one starts up."""
    total = moments[-1].rows

    def between(start: float, end: float) -> float:
        inside = [moment for moment in moments if start * total <= moment.rows <= end * total]
        if len(inside) < 2 or inside[0].rows == inside[-1].rows:
            return float("nan")
        return (read(inside[-1]) - read(inside[0])) / (inside[-1].rows - inside[0].rows)

    return between(0.8, 0.98) / between(0.2, 0.4)


HEADER = (
    "| rows | s | ms/row: all | rows | plan | close | CPU ms/row: feeder | engine | steps/row | MiB: feeder | engine "
    "| bytes/row out | last/first: s | feeder CPU | engine CPU |\n|" + "---|" * 15
)


def line(f: Figures) -> str:
    def ms(seconds: float) -> str:
        return f"{1e3 * seconds / f.rows:.3f}"

    ratios = (
        last_over_first(f.moments, lambda m: m.at_s),
        last_over_first(f.moments, lambda m: m.feeder_cpu_s),
        last_over_first(f.moments, lambda m: m.engine_cpu_s),
    )
    total = sum(f.seconds.values())
    feeder = sum(f.feeder_cpu_s.values()) - f.feeder_cpu_s["load"]
    cells = (
        *(f"{f.rows:,}", f"{total:.1f}", ms(total - f.seconds["load"])),
        *(ms(f.seconds["rows"]), ms(f.seconds["plan"]), ms(f.seconds["close"])),
        *(ms(feeder), ms(f.moments[-1].engine_cpu_s - f.moments[0].engine_cpu_s), f"{f.steps / f.rows:.3f}"),
        *(f"{f.feeder_peak_rss / 2**20:.0f}", f"{f.engine_peak_rss / 2**20:.0f}", f"{f.output_bytes / f.rows:.0f}"),
        *(f"{ratio:.2f}" for ratio in ratios),
    )
    return f"| {' | '.join(cells)} |"


def measure(options: argparse.Namespace, directory: Path, rows: int) -> Figures | None:
    """One job in a process of its own; None when it took longer than allowed."""
    arguments = [*("--child", str(rows)), *("--directory", str(directory))]
    arguments += [] if options.threads is None else ["--threads", str(options.threads)]
    command = [sys.executable, "-m", "bench.rows_flat", *arguments]
    root = Path(__file__).parents[1]
    try:
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=options.limit_s, check=True, cwd=root
        )
    except subprocess.TimeoutExpired:
        return None
    found: dict[str, Any] = json.loads(ended.stdout)
    return Figures(**{**found, "moments": [Moment(**moment) for moment in found["moments"]]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1000,10000,100000")
    parser.add_argument("--model", default="small")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--limit-s", type=float, default=1800, help="for each job")
    parser.add_argument("--json", type=Path, default=None, dest="json_path")
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rows-flat-") as scratch:
        if options.child is not None:
            print(json.dumps(asdict(run_one(options.directory, options.child, options.threads, Path(scratch)))))
            return
        directory = resolve_model(ModelSpec(model="demo" if options.model == "small" else options.model)).directory
        if options.model == "small":
            directory = make_small(Path(scratch) / "small", directory)
        print(HEADER)
        kept = []
        for rows in map(int, options.rows.split(",")):
            figures = measure(options, directory, rows)
            print(f"| {rows:,} | over {options.limit_s:.0f} |" if figures is None else line(figures), flush=True)
            kept += [] if figures is None else [asdict(figures)]
        if options.json_path is not None:
            record = {"model": options.model, "machine": asdict(this_machine()), "jobs": kept}
            options.json_path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
