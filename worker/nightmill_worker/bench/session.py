"""One benchmark session: load the model once, build the contenders, measure the machine, run the comparison."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.bench import comparison, own_engine, report
from nightmill_worker.bench.machine import this_machine
from nightmill_worker.bench.measurement import Measurement
from nightmill_worker.bench.roofline import Bound, workload_bound
from nightmill_worker.bench.transformers_static import TransformersStatic
from nightmill_worker.bench.workload import Workload, make_workloads
from nightmill_worker.engine.roofline import Ceilings, Roofline
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.dtype import resolve_dtype, torch_dtype
from nightmill_worker.model.runner import ModelRunnerConfig
from nightmill_worker.model.source import resolve_model

Say = Callable[[str], None]
WARM_UP_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What `nightmill bench` was asked to compare, and with which limits."""

    workloads: tuple[str, ...]
    policies: tuple[str, ...]  # continuous, static
    baselines: tuple[str, ...]  # transformers
    rounds: int
    model: str
    dtype: str
    max_num_seqs: int
    static_batch: int
    max_num_batched_tokens: int
    page_size: int
    threads: int
    limit: int | None  # rows of each workload
    quantization: str | None = None


class BenchSession:
    """A loaded model with everything that will be compared on it."""

    def __init__(self, options: BenchOptions, say: Say) -> None:
        torch.set_num_threads(options.threads)
        self._options, self._say = options, say
        spec = ModelSpec(model=options.model, dtype=options.dtype, quantization=options.quantization)
        if options.quantization is not None:
            # No rival here computes this: its figures may not stand in a row with those of bf16 without a word.
            say(f"weights quantised to {options.quantization}: NOT bf16, and other answers than bf16 gives")
        self._resolved = resolve_model(spec, progress=say)
        self._config = ModelConfig.from_directory(self._resolved.directory)
        self._dtype = resolve_dtype(options.dtype, self._config)
        made = self._make_workloads()
        self.workloads = [made[name] for name in options.workloads]
        self._warm_up = _first_rows(made["W0"], min(WARM_UP_ROWS, options.limit or WARM_UP_ROWS))
        self._roofline: Roofline | None = None  # of our runner, on whatever device it took
        self._contenders = self._make_contenders(spec)
        self._measurements: list[Measurement] = []
        self._ceilings: Ceilings | None = None
        self._bounds: dict[str, Bound] = {}

    def run(self, on_start: comparison.OnStart) -> list[comparison.Cell]:
        """Measure everything; `on_start` returns a row counter for each single run."""
        if self._roofline is None:
            raise RuntimeError("the runner was built without measuring its device")
        self._say("warming up")
        self._ceilings = self._roofline.ceilings
        self._bounds = {
            w.name: workload_bound(
                w, self._config, self._ceilings, self._options.max_num_seqs, self._dtype, self._options.quantization
            )
            for w in self.workloads
        }
        for contender in self._contenders:
            contender.run(self._warm_up)
        for m in comparison.compare(self._contenders, self.workloads, self._options.rounds, on_start):
            self._measurements.append(m)
            self._say(f"{m.workload} {m.engine}: {m.output_tokens_per_s:.1f} tokens/s in {m.seconds:.1f} s")
        return comparison.summarise(self._measurements, self._bounds)

    def json(self, cells: list[comparison.Cell]) -> str:
        """The whole session as JSON, with machine, versions, commit and settings."""
        if self._ceilings is None:
            raise RuntimeError("nothing has been measured yet")
        settings = dataclasses.asdict(self._options) | {
            "model": self._resolved.name,
            "dtype": self._dtype,
            "threads": torch.get_num_threads(),
        }
        return report.comparison_json(
            cells, self._measurements, self.workloads, self._bounds, self._ceilings, this_machine(), settings
        )

    def _make_workloads(self) -> dict[str, Workload]:
        tokenizer = Tokenizer.load(self._resolved.directory)
        made = make_workloads(lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer.decode)
        limit = self._options.limit
        for w in (made[name] for name in self._options.workloads):
            if not w.is_reference or limit is not None:
                self._say(
                    f"{w.name}: not the reference rows (other text, tokenizer, or --limit): compare in this run only"
                )
        return made if limit is None else {name: _first_rows(w, limit) for name, w in made.items()}

    def _make_contenders(self, spec: ModelSpec) -> list[comparison.Contender]:
        o = self._options
        engine_options = EngineOptions(page_size=o.page_size, max_num_seqs=o.max_num_seqs)
        runner = ModelRunnerConfig(model_dir=self._resolved.directory, spec=spec, options=engine_options).build()
        self._roofline = runner.roofline
        limits = {
            "max_num_batched_tokens": o.max_num_batched_tokens,
            "max_model_len": self._config.resolve_max_model_len(None),
        }
        ours: list[own_engine.OwnEngine] = []
        if "continuous" in o.policies:
            ours.append(own_engine.continuous(runner, max_num_seqs=o.max_num_seqs, **limits))
        if "static" in o.policies:
            ours.append(own_engine.static(runner, batch_size=o.static_batch, **limits))
        if o.quantization is not None:
            short = {"continuous": o.quantization, "static": f"{o.quantization} static"}  # the table has 80 columns
            ours = [dataclasses.replace(engine, name=short[engine.name]) for engine in ours]
        contenders: list[comparison.Contender] = [*ours]
        if "transformers" in o.baselines:
            dtype = torch_dtype(self._dtype)
            contenders.append(TransformersStatic(self._resolved.directory, dtype, batch_size=o.static_batch))
        return contenders


def _first_rows(workload: Workload, count: int) -> Workload:
    return dataclasses.replace(workload, rows=workload.rows[:count], sha256="")
