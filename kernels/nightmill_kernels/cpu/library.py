"""The C library's functions as typed Python calls. Mirrors nightmill.h."""

from ctypes import POINTER, Structure, addressof, byref, c_float, c_int, c_int32, c_int64, c_void_p

import torch

from nightmill_kernels.cpu import loader, openmp
from nightmill_kernels.cpu.recording import Op, Recorded, Recorder, Recording, StepCall

ABI = 8
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
SILU, GELU_TANH = 0, 1

UNSUPPORTED = 1
_MESSAGES = {
    2: "query_starts must ascend within the tokens given",
    3: "a context length is negative or does not fit the page table",
    4: "a page table holds a page id outside the pool",
    5: "a slot lies outside the pool",
    6: "a position lies outside the cos_sin table",
    8: "a prefix group's sequences must be decodes, in no other group, whose first pages are the same",
    9: "a row lies outside the packed weight",
    10: "rows to keep must ascend within those given",
}


class AttentionCall(Structure):
    """struct nm_attention."""

    _fields_ = (
        ("q", c_void_p),
        ("k_pool", c_void_p),
        ("v_pool", c_void_p),
        ("out", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("page_tables", c_void_p),
        ("group_starts", c_void_p),
        ("group_members", c_void_p),
        ("group_pages", c_void_p),
        ("q_stride", c_int64),
        ("out_stride", c_int64),
        ("pool_stride", c_int64),
        ("num_tokens", c_int64),
        ("num_pages", c_int64),
        ("num_sequences", c_int32),
        ("table_width", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("page_size", c_int32),
        ("dtype", c_int32),
        ("window", c_int32),
        ("threads", c_int32),
        ("num_groups", c_int32),
        ("num_members", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    )


class NormCall(Structure):
    """struct nm_norm."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("outer", c_int64),
        ("inner", c_int64),
        ("dim", c_int64),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("dtype", c_int32),
        ("threads", c_int32),
        ("eps", c_float),
        ("weight_offset", c_float),
    )


class RopeCall(Structure):
    """struct nm_rope."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_pool", c_void_p),
        ("v_pool", c_void_p),
        ("positions", c_void_p),
        ("cos_sin", c_void_p),
        ("slots", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("pool_stride", c_int64),
        ("num_tokens", c_int64),
        ("num_pages", c_int64),
        ("max_len", c_int64),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rot", c_int32),
        ("page_size", c_int32),
        ("dtype", c_int32),
        ("wide_positions", c_int32),
        ("threads", c_int32),
    )


class DrawCall(Structure):
    """struct nm_draw."""

    _fields_ = (
        ("logits", c_void_p),
        ("out", c_void_p),
        ("temperature", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("seed", c_void_p),
        ("position", c_void_p),
        ("rows", c_int64),
        ("vocab", c_int64),
        ("stride", c_int64),
        ("dtype", c_int32),
        ("threads", c_int32),
    )


class Int8Layer(Structure):
    """struct nm_int8_layer."""

    _fields_ = (
        ("panels", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("gate", c_int32),
    )


class Int8Call(Structure):
    """struct nm_int8_call."""

    _fields_ = (
        ("layer", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_int64),
        ("dtype", c_int32),
        ("threads", c_int32),
    )


class LinearLayer(Structure):
    """struct nm_linear."""

    _fields_ = (
        ("packed", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("dtype", c_int32),
        ("gate", c_int32),
        ("has_bias", c_int32),
    )

    @classmethod
    def of(cls, dtype: torch.dtype, outputs: int, inputs: int, gate: int) -> "LinearLayer":
        """A layer that is not packed yet."""
        return cls(outputs=outputs, inputs=inputs, dtype=DTYPES[dtype], gate=gate)


class LinearCall(Structure):
    """struct nm_linear_call."""

    _fields_ = (
        ("layer", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("rows", c_int64),
        ("threads", c_int32),
    )


class KeepCall(Structure):
    """struct nm_keep."""

    _fields_ = (
        ("x", c_void_p),
        ("index", c_void_p),
        ("rows", c_int64),
        ("count", c_int64),
        ("width", c_int64),
        ("stride", c_int64),
    )


class Library:
    """One instruction set's library, bound to torch's thread pool. Calls raise ValueError for what C found wrong."""

    def __init__(self, isa: str) -> None:
        self.isa = isa
        self._c = loader.load(isa)
        self._c.nm_set_parallel.argtypes = [c_void_p]
        self._c.nm_set_parallel.restype = None
        for name, arguments in (
            ("nm_paired", [c_int, c_int, c_int]),
            ("nm_paged_attention", [POINTER(AttentionCall)]),
            ("nm_rms_norm", [POINTER(NormCall)]),
            ("nm_rope_store", [POINTER(RopeCall)]),
            ("nm_gated_mul", [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_int, c_int]),
            ("nm_argmax", [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_int]),
            ("nm_draw", [POINTER(DrawCall)]),
            ("nm_linear_bytes", [POINTER(LinearLayer)]),
            ("nm_linear_pack", [POINTER(LinearLayer), c_void_p, c_int64, c_void_p, c_int]),
            ("nm_linear", [POINTER(LinearLayer), c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int]),
            ("nm_linear_rows", [POINTER(LinearLayer), c_void_p, c_int64, c_int, c_void_p, c_int]),
            ("nm_linear_int8", [POINTER(Int8Call)]),
            ("nm_keep_rows", [POINTER(KeepCall)]),
            ("nm_replay", [POINTER(Recorded), c_int64, POINTER(StepCall), POINTER(c_int64)]),
        ):
            getattr(self._c, name).argtypes = arguments
        self._c.nm_linear_bytes.restype = c_int64
        if self._c.nm_abi() != ABI:
            raise loader.BuildError(f"the {isa} library speaks ABI {self._c.nm_abi()}, this code {ABI}")
        self._c.nm_set_parallel(openmp.team_function())
        self.recorder = Recorder()

    def paired(self, dtype: torch.dtype, *, head_dim: int, page_size: int) -> bool:
        """Whether pages of such a pool are paired, see nm_paired in nightmill.h."""
        return bool(self._c.nm_paired(DTYPES[dtype], head_dim, page_size))

    def paged_attention(self, call: AttentionCall) -> bool:
        """False when the library does not take this shape."""
        return self._noted(Op.ATTENTION, call, _done("paged_attention", self._c.nm_paged_attention(byref(call))))

    def rms_norm(self, call: NormCall) -> bool:
        """False when the library does not take this shape."""
        return self._noted(Op.RMS_NORM, call, _done("rms_norm", self._c.nm_rms_norm(byref(call))))

    def rope_store(self, call: RopeCall) -> bool:
        """False when the library does not take this shape."""
        return self._noted(Op.ROPE_STORE, call, _done("rope_store", self._c.nm_rope_store(byref(call))))

    def gated_mul(self, gate_up: torch.Tensor, out: torch.Tensor, gate: int) -> None:
        """gate_up [T, 2F], rows contiguous; out [T, F] contiguous; gate SILU or GELU_TANH."""
        rows, width = out.shape
        stride, dtype = gate_up.stride(0), DTYPES[gate_up.dtype]
        threads = torch.get_num_threads()
        _done(
            "gated_mul",
            self._c.nm_gated_mul(gate_up.data_ptr(), out.data_ptr(), rows, width, stride, dtype, gate, threads),
        )

    def argmax(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        """Logits [R, V], rows contiguous; out int32 [R]."""
        rows, vocab = logits.shape
        stride, dtype = logits.stride(0), DTYPES[logits.dtype]
        threads = torch.get_num_threads()
        _done("argmax", self._c.nm_argmax(logits.data_ptr(), out.data_ptr(), rows, vocab, stride, dtype, threads))

    def draw(self, call: DrawCall) -> bool:
        """False when the library does not take this shape."""
        return _done("draw", self._c.nm_draw(byref(call)))

    def linear_int8(self, call: Int8Call) -> bool:
        """False when the library does not take this shape."""
        return self._noted(Op.LINEAR_INT8, call, _done("linear_int8", self._c.nm_linear_int8(byref(call))))

    def linear_bytes(self, layer: LinearLayer) -> int:
        """Memory that a packed layer takes."""
        size: int = self._c.nm_linear_bytes(byref(layer))
        if size < 0:
            raise ValueError(f"linear: a layer of {layer.inputs} inputs and {layer.outputs} outputs cannot be packed")
        return size

    def linear_pack(self, layer: LinearLayer, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Weight [N, inputs] with contiguous rows and bias [N] into the layer's memory."""
        bias_at = None if bias is None else bias.data_ptr()
        threads = torch.get_num_threads()
        _done("linear", self._c.nm_linear_pack(byref(layer), weight.data_ptr(), weight.stride(0), bias_at, threads))

    def linear(self, layer: LinearLayer, x: torch.Tensor, out: torch.Tensor) -> None:
        """X [T, inputs] and out [T, outputs], rows contiguous."""
        threads = torch.get_num_threads()
        x_at, out_at, x_stride, out_stride = x.data_ptr(), out.data_ptr(), x.stride(0), out.stride(0)
        _done("linear", self._c.nm_linear(byref(layer), x_at, x_stride, out_at, out_stride, len(x), threads))
        if self.recorder.is_on:
            call = LinearCall(addressof(layer), x_at, out_at, x_stride, out_stride, len(x), threads)
            self.recorder.note(Op.LINEAR, call)

    def linear_rows(self, layer: LinearLayer, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Rows int32 or int64 [R]; out [R, inputs] contiguous."""
        threads, wide = torch.get_num_threads(), rows.dtype == torch.int64
        _done(
            "linear_rows",
            self._c.nm_linear_rows(byref(layer), rows.data_ptr(), len(rows), wide, out.data_ptr(), threads),
        )

    def keep_rows(self, call: KeepCall) -> None:
        """Move rows to the front, in place."""
        self._noted(Op.KEEP_ROWS, call, _done("keep_rows", self._c.nm_keep_rows(byref(call))))

    def replay(self, recording: Recording, step: StepCall) -> None:
        """Do every call of a recording again, in order, for a step. ValueError as the call itself would raise it."""
        stopped_at = c_int64(-1)
        status = self._c.nm_replay(recording.calls(), len(recording), byref(step), byref(stopped_at))
        if status == UNSUPPORTED:
            raise ValueError(f"call {stopped_at.value} of a recording is none that the library takes")
        if status:
            _done(recording.op_at(stopped_at.value).name.lower(), status)

    def _noted(self, op: Op, call: Structure, done: bool) -> bool:
        if done:
            self.recorder.note(op, call)
        return done


def _done(name: str, status: int) -> bool:
    if status == 0:
        return True
    if status == UNSUPPORTED:
        return False
    if status in _MESSAGES:
        raise ValueError(f"{name}: {_MESSAGES[status]}")
    raise MemoryError(f"{name}: out of memory")
