"""`--model`: from what the user wrote to a local directory that everything else reads."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nightmill.config import Settings
from nightmill.errors import ModelError
from nightmill.records import ModelSpec
from nightmill_worker.model import demo
from nightmill_worker.model.bucket import bucket_model
from nightmill_worker.model.gguf import gguf_model
from nightmill_worker.model.hub import hub_model

_IDENTITY = re.compile(r".*\.(json|jinja|model|safetensors|txt)")
_SAMPLE = 1 << 20  # bytes at either end of a weight file that count for a directory's digest
_WHOLE = 64 << 20  # files up to here count whole
_KINDS = "a local directory, a .gguf file, a hub id (org/name), s3://bucket/prefix, or demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model on this machine."""

    directory: Path  # config.json and tokenizer files; safetensors when has_weights
    name: str  # for people and for the `model` column
    digest: str  # of what is in the directory, wherever it came from; identity, not integrity
    has_weights: bool


def resolve_model(
    spec: ModelSpec, *, settings: Settings | None = None, progress: Callable[[str], None] | None = None
) -> ResolvedModel:
    """Find or fetch the model, and check that the directory holds what its load format needs.

    `--load-format dummy` needs a configuration and a tokenizer only; weights are not fetched.

    `settings` (from the environment when not given) says where the cache is; `progress` gets a line per thing done.

    Raises:
        ModelError: no such model; says what was tried and what to do.
    """
    settings = settings or Settings.from_env()
    progress = progress or (lambda message: None)
    with_weights = spec.load_format != "dummy"
    directory, name = _locate(spec, settings, with_weights, progress)
    _check(directory, spec.model, with_weights)
    return ResolvedModel(
        directory=directory,
        name=name,
        digest=directory_digest(directory),
        has_weights=any(directory.glob("*.safetensors")),
    )


def _locate(
    spec: ModelSpec, settings: Settings, with_weights: bool, progress: Callable[[str], None]
) -> tuple[Path, str]:
    model = spec.model
    if spec.revision is not None and (model == "demo" or model.startswith("s3://") or Path(model).exists()):
        raise ModelError(f"--revision is for hub models; {model} has none", hint="leave --revision out")
    if model == "demo":
        return demo.demo_model(settings.cache, settings.demo_wheel, progress), demo.NAME
    if model.startswith("s3://"):
        return bucket_model(model, settings.cache, with_weights, progress), model.rstrip("/").rsplit("/", 1)[-1]
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{model} is a file, but not a .gguf file", hint=f"--model takes {_KINDS}")
        return gguf_model(path.resolve(), settings.cache, progress), path.stem
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")) or not _is_hub_id(model):
        raise ModelError(f"there is no model at {path}", hint=f"--model takes {_KINDS}")
    return hub_model(model, spec.revision, with_weights, progress), model


def _is_hub_id(text: str) -> bool:
    return re.fullmatch(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*", text) is not None


def _check(directory: Path, model: str, with_weights: bool) -> None:
    if not (directory / "config.json").is_file():
        ggufs = sorted(directory.glob("*.gguf"))
        hint = f"give --model the file itself: {ggufs[0]}" if ggufs else "a model directory has a config.json"
        raise ModelError(f"{directory} has no config.json", hint=hint)
    if not (directory / "tokenizer.json").is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json",
            hint="make one with transformers: AutoTokenizer.from_pretrained(directory).save_pretrained(directory)",
        )
    if with_weights and not any(directory.glob("*.safetensors")):
        others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in directory.glob(pattern))
        found = f" (it has {', '.join(others[:3])}: only safetensors are read)" if others else ""
        raise ModelError(
            f"{model} has no *.safetensors in {directory}{found}",
            hint="for a benchmark without weights: --load-format dummy",
        )


def directory_digest(directory: Path) -> str:
    """sha256 over names, sizes and contents of the files that make a model what it is.

    Of weight files over 64 MiB only the size and both ends (the header is at the front) count: reading 16 GB at every
    start to learn that nothing changed is not worth it.
    """
    total = hashlib.sha256()
    for path in sorted(directory.iterdir(), key=lambda path: path.name):
        if not path.is_file() or not _IDENTITY.fullmatch(path.name):
            continue
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _WHOLE:
                total.update(hashlib.file_digest(file, "sha256").digest())
            else:
                total.update(file.read(_SAMPLE))
                file.seek(size - _SAMPLE)
                total.update(file.read(_SAMPLE))
    return total.hexdigest()
