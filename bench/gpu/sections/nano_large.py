"""W4 on Llama-3.1-8B's shape: 16 GB of weights, drawn on the device."""

from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from bench.gpu.sections.nano import Nano, run_nano


def run(notebook: Notebook, task: Task) -> None:
    run_nano(notebook, task, Nano(model="llama-3.1-8b", runs=2, target=8_000))
