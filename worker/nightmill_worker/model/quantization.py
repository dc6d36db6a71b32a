"""What `--quantization` means: which of a model's weights are held in fewer bits, and where that can run."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from nightmill.errors import ModelError
from nightmill_kernels.gated_mul import Gate
from nightmill_worker.model.linear import Linear
from nightmill_worker.model.linear_int8 import Int8Linear

INT8 = "int8"


class AnyLinear(Protocol):
    """A linear layer as a decoder layer calls it."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, out] of x [rows, in]; `out`: where to."""
        ...


MakeLinear = Callable[[Tensor, Tensor | None, Gate | None], AnyLinear]
"""(weight [out, in], bias [out] or None, gate or None) → the layer; takes them over. A gate halves its outputs."""


def check_quantization(quantization: str | None, device: str) -> None:
    """Refuse what cannot run, before anything is loaded.

    Args:
        quantization: As in ModelSpec.
        device: torch's name of the device's kind.

    Raises:
        ModelError: an unknown name, or a device that has no kernels for it.
    """
    if quantization is None:
        return
    if quantization != INT8:
        raise ModelError(
            f"quantization {quantization!r} is not supported", hint=f"Known: {INT8}. Or leave --quantization out."
        )
    if device != "cpu":
        raise ModelError(
            f"--quantization {INT8} runs on CPUs only, and the model would run on {device}",
            hint="Leave --quantization out, or pass --device cpu.",
        )


def linear_maker(quantization: str | None) -> MakeLinear:
    """How the four linear layers of each decoder layer are made. Embedding, norms and output projection stay as are."""
    return Linear if quantization is None else Int8Linear
