"""One module per section, each with `run(notebook, task)`."""
