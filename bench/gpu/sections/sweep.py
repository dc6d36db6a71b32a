"""Launch configurations of decode attention, for whoever chooses them. Needs a device: it measures nothing else."""

from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from bench.gpu.sections import kernels


def run(notebook: Notebook, task: Task) -> None:
    if task.is_tiny:
        notebook.note("nothing to rehearse: it compiles for the device it runs on")
        return
    kernels.sweep(notebook, task)
