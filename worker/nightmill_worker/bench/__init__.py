"""Workloads W1–W3 and the comparison of scheduling policies."""
