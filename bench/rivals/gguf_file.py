"""The model's own bf16 weights in GGUF files for the engines that read nothing else.

`python -m bench.rivals.gguf_file SOURCE.gguf MODEL_DIRECTORY TARGET.gguf F16|BF16`

SOURCE is a GGUF of the same model in any precision: its metadata (vocabulary, merges, shapes) is taken as it is, its
tensors are replaced by those of `MODEL_DIRECTORY/model.safetensors`, so every engine multiplies the same numbers.
"""

import re
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

_TYPES = {"F16": gguf.GGMLQuantizationType.F16, "BF16": gguf.GGMLQuantizationType.BF16}
_FILE_TYPES = {"F16": gguf.LlamaFileType.MOSTLY_F16, "BF16": gguf.LlamaFileType.MOSTLY_BF16}
_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_gguf(source: Path, model_directory: Path, target: Path, precision: str) -> None:
    """Write `target` with matrices in `precision` (F16 or BF16) and vectors in F32, as llama.cpp's converter does.

    Raises:
        ValueError: the source is no llama-shaped GGUF, or a tensor has no counterpart in the safetensors file.
    """
    reader = gguf.GGUFReader(source)
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"{source} holds a {architecture} model; only the llama layout is known here")
    weights = load_file(model_directory / "model.safetensors")
    writer = gguf.GGUFWriter(target, architecture)
    _copy_metadata(reader, writer)
    writer.add_file_type(_FILE_TYPES[precision])
    heads = {
        "attn_q": int(_field(reader, "llama.attention.head_count")),
        "attn_k": int(_field(reader, "llama.attention.head_count_kv")),
    }
    for tensor in reader.tensors:
        name = _safetensors_name(tensor.name)
        if name not in weights:
            raise ValueError(f"{source}: tensor {tensor.name} would be {name}, which {model_directory} does not have")
        weight = weights[name].float()
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = _paired(weight, heads[kind])
        if weight.dim() == 1:
            writer.add_tensor(tensor.name, weight.numpy())
        else:
            writer.add_tensor(tensor.name, _encoded(weight, precision), raw_dtype=_TYPES[precision])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _field(reader: gguf.GGUFReader, name: str) -> str | int:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"{name} is missing from the GGUF's metadata")
    value: str | int = field.contents()
    return value


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # the writer puts its own
        of_items = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=of_items)


def _safetensors_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is None:
        return _TENSORS.get(name, name)
    return f"model.layers.{layer[1]}.{_LAYER_TENSORS.get(layer[2], layer[2])}.{layer[3]}"


def _paired(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of `weight [heads·D, d]` from rotate-half order to the neighbouring pairs that GGUF's llama rotates."""
    rows, width = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, width).transpose(1, 2).reshape(rows, width)


def _encoded(weight: torch.Tensor, precision: str) -> npt.NDArray[np.generic]:
    if precision == "F16":
        return weight.half().numpy()
    bits: npt.NDArray[np.uint16] = weight.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return bits.view(np.uint8)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
