"""W4 on Qwen3-0.6B's shape: decode is nearly all reads of KV, and a millisecond on the host is a fifth."""

from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from bench.gpu.sections.nano import Nano, run_nano


def run(notebook: Notebook, task: Task) -> None:
    run_nano(notebook, task, Nano(model="qwen3-0.6b", runs=3, target=21_700))
