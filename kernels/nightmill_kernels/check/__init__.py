"""Proof of the Triton kernels without a GPU: each is compiled for real ones, and what came out is judged.

`make kernels-check` runs it; docs/kernels-check.md says how to read its table.
"""
