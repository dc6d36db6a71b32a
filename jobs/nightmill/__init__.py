"""Nightmill control plane: jobs, shards, rows, output. Never imports torch."""

__version__ = "0.1.0"
