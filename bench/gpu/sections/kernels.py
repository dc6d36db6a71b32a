"""Kernels on their own: attention, and what the others' benches offer."""

from bench.gpu.notebook import Notebook
from bench.gpu.section import Task


def run(notebook: Notebook, task: Task) -> None:
    notebook.note("to be written")
