"""The real scheduler with a cost model instead of a device: what would this file take, and why."""
