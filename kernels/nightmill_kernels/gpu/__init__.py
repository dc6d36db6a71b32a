"""The Triton kernels. Modules here import triton; the wrappers import them on the first call that needs them."""
