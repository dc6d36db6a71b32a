"""A program: import all that a GPU run needs, without the packages such a machine may lack, and run a tiny model.

    python tests/unit/bare_engine.py MODEL_DIR

Prints one line of JSON: the modules imported, those that failed with why, and what the model answered.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

MISSING = ("celery", "kombu", "amqp", "sqlalchemy", "alembic", "boto3", "botocore", "psycopg", "click", "gguf")
PACKAGES = ("nightmill_kernels", "nightmill_worker.engine", "nightmill_worker.model", "bench.gpu")


class Blocker:
    """As if the packages were not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r} (this machine lacks it)", name=name)
        return None


def module_names() -> Iterator[str]:
    for root in PACKAGES:
        package = importlib.import_module(root)
        yield root
        for module in pkgutil.walk_packages(package.__path__, f"{root}."):
            # Programs do their work when they are imported by name; their parts are modules of their own.
            if not module.name.endswith(".__main__"):
                yield module.name


def failures(names: Sequence[str]) -> dict[str, str]:
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            failed[name] = repr(error)
    return failed


def answer(directory: Path) -> list[list[int]]:
    from nightmill.records import EngineOptions, ModelSpec
    from nightmill.sampling import SamplingParams
    from nightmill.states import Tier
    from nightmill_worker.engine.loop import EngineLoop
    from nightmill_worker.engine.options import LoopOptions
    from nightmill_worker.engine.request import Request
    from nightmill_worker.model_recipe import ModelRecipe

    recipe = ModelRecipe(
        directory=directory,
        spec=ModelSpec(model="tiny", dtype="float32", load_format="dummy"),
        options=EngineOptions(device="cpu", page_size=4, pool_bytes=1 << 20),
    )
    loop = EngineLoop(recipe.build(), LoopOptions(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64))
    for i, temperature in enumerate((0.0, 0.8)):
        sampling = SamplingParams(max_tokens=5, temperature=temperature, ignore_eos=True)
        loop.add(
            Request(
                request_id=i,
                job_id="job",
                tier=Tier.NORMAL,
                prompt=(5, 6, 7, 8, 9 + i),
                sampling=sampling,
                seed=i,
            )
        )
    ended = {}
    while loop.has_work:
        ended |= {finished.request_id: list(finished.token_ids) for finished in loop.step()}
    loop.close()
    return [ended[i] for i in sorted(ended)]


def main() -> None:
    sys.meta_path.insert(0, Blocker())  # type: ignore[arg-type]
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench
    names = list(module_names())
    found = {"modules": len(names), "failed": failures(names), "answers": answer(Path(sys.argv[1]))}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
