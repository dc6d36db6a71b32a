"""Commands that need the worker's packages, registered through the entry-point group nightmill.commands."""
