"""Kernels for the tests of the compile check: a good one, and one for each thing that is refused."""

import triton
import triton.language as tl

from nightmill_kernels.gpu.spec import KernelSpec


@triton.jit
def _product(a, b, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    left = tl.load(a + tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :])
    right = tl.load(b + tl.arange(0, K)[:, None] * N + tl.arange(0, N)[None, :])
    return tl.dot(left, right)


@triton.jit
def matmul_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + rows * N + columns, _product(a, b, M, N, K))


@triton.jit
def attention_kernel(q, k, v, out, length, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """The inner loop of attention: what its tiles need in registers and shared memory is the real thing."""
    rows, columns, dims = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    queries = tl.load(q + rows[:, None] * D + dims[None, :])
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for start in range(0, length, N):
        place = (start + columns)[:, None] * D + dims[None, :]
        scores = tl.dot(queries, tl.trans(tl.load(k + place)))
        top = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        scale = tl.exp2(best - top)
        total = total * scale + tl.sum(weights, 1)
        acc = acc * scale[:, None] + tl.dot(weights.to(queries.dtype), tl.load(v + place))
        best = top
    tl.store(out + rows[:, None] * D + dims[None, :], acc / total[:, None])


@triton.jit
def copy_kernel(a, out, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out + index, tl.load(a + index))


@triton.jit
def forgotten_kernel(a, out, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out + index, tl.load(a + index))


def matmul(config: str, dtype: str, m: int, n: int, k: int, *, warps: int = 4) -> KernelSpec:
    return KernelSpec(
        stem="matmul",
        config=config,
        kernel=matmul_kernel,
        signature={"a": dtype, "b": dtype, "out": "*fp32"},
        constants={"M": m, "N": n, "K": k},
        divisible=frozenset({"a", "b", "out"}),
        num_warps=warps,
        num_stages=2,
        wants_tensor_cores=True,
    )


def attention(config: str, m: int, n: int, d: int, *, warps: int, stages: int) -> KernelSpec:
    return KernelSpec(
        stem="attention",
        config=config,
        kernel=attention_kernel,
        signature={"q": "*bf16", "k": "*bf16", "v": "*bf16", "out": "*fp32", "length": "i32"},
        constants={"M": m, "N": n, "D": d},
        divisible=frozenset({"q", "k", "v", "out"}),
        num_warps=warps,
        num_stages=stages,
        wants_tensor_cores=True,
    )


def copy(
    config: str,
    *,
    signature: dict[str, str],
    divisible: tuple[str, ...] = ("a", "out"),
    archs: frozenset[int] | None = None,
) -> KernelSpec:
    return KernelSpec(
        stem="copy",
        config=config,
        kernel=copy_kernel,
        signature=signature,
        constants={"N": 1024},
        divisible=frozenset(divisible),
        num_warps=1,
        num_stages=1,
        wants_tensor_cores=config == "no tensor cores",
        min_arch=100 if config == "sm_100 only" else 80,
        archs=archs,
    )


def specs() -> list[KernelSpec]:
    pointers = {"a": "*fp32", "out": "*fp32"}
    return [
        matmul("good", "*bf16", 64, 64, 64),
        attention("good", 64, 64, 64, warps=4, stages=2),
        attention("spills", 128, 128, 128, warps=4, stages=2),
        attention("shared memory", 64, 128, 128, warps=8, stages=8),
        copy("good", signature=pointers),
        copy("unaligned", signature=pointers, divisible=()),
        copy("no tensor cores", signature=pointers),
        copy("an argument short", signature={"a": "*fp32"}, divisible=("a",)),
        copy("twice", signature=pointers),
        copy("twice", signature=pointers),
        copy("sm_100 only", signature=pointers),
        copy("by architecture", signature=pointers, archs=frozenset({90, 100})),
        copy("by architecture", signature={"a": "*fp16", "out": "*fp32"}, archs=frozenset({86})),
    ]
