"""`make gpu`: proves and measures Nightmill on a GPU, in one command of at most eight minutes.

It needs python3 with torch, triton, transformers, pytest and numpy, nothing installed of ours:

    PYTHONPATH=jobs:worker:kernels:. python3 -m bench.gpu --out DIR
"""
