"""The converting process: `python -m nightmill_worker.model.gguf_convert FILE DIRECTORY`."""

import json
import sys
from pathlib import Path
from typing import Any

from nightmill.errors import ModelError
from nightmill_worker.model.gguf import EXIT_MODEL_ERROR, MARK
from nightmill_worker.model.gguf_tokenizer import (
    GgufMetadata,
    build_byte_level_tokenizer,
    mend_sentencepiece,
    set_template,
    tokenizer_config,
)


def convert(source: Path, target: Path) -> None:
    """Write config, generation config, bfloat16 safetensors and a mended tokenizer into `target`.

    Quantised blocks are widened to bfloat16: the speed is bfloat16's, the quality is the GGUF's.

    Raises:
        ModelError: the tokenizer is of a kind we would get wrong.
    """
    metadata = GgufMetadata.read(source)
    if metadata.is_byte_level and metadata.tokenizer("pre") is None:
        _tell({"warning": f"{source.name} does not name its pre-tokenizer: taking the one of old files"})
    tokenizer = load_tokenizer(source, metadata)
    _save_weights(source, target, metadata)
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", tokenizer_config(metadata))
    if metadata.chat_template:
        (target / "chat_template.jinja").write_text(metadata.chat_template, encoding="utf-8")


def load_tokenizer(source: Path, metadata: GgufMetadata) -> Any:
    """The file's tokenizer as a `tokenizers.Tokenizer`.

    Raises:
        ModelError: a pre-tokenizer or a kind of vocabulary that is not known here.
    """
    kind = metadata.tokenizer("model")
    if metadata.is_byte_level:
        tokenizer = build_byte_level_tokenizer(metadata)
    elif kind in ("llama", "gemma4"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).backend_tokenizer
        if kind == "llama":
            tokenizer = mend_sentencepiece(tokenizer, metadata)
    else:
        raise ModelError(
            f"{source.name} has a vocabulary of the kind {kind!r}; gpt2, llama and gemma4 are known",
            hint="give --model the directory with the model's tokenizer.json",
        )
    set_template(tokenizer, metadata)
    return tokenizer


def _save_weights(source: Path, target: Path, metadata: GgufMetadata) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model, loading = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    missing = sorted(loading["missing_keys"])
    if missing:  # transformers would leave them random
        raise ModelError(
            f"{source.name} lacks {len(missing)} of the model's tensors: {', '.join(missing[:3])}",
            hint="it is a part of a split file or damaged; give the whole model",
        )
    model.save_pretrained(target)
    for name in ("config.json", "generation_config.json"):
        path = target / name
        settings: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        for stray in ("quantization_config", "_name_or_path", "_model_name_or_path", "_from_model_config"):
            settings.pop(stray, None)
        settings["bos_token_id"] = metadata.token_id("bos")
        stops = metadata.end_token_ids()
        settings["eos_token_id"] = stops[0] if len(stops) == 1 else list(stops) or None
        settings["pad_token_id"] = metadata.token_id("padding")
        _write_json(path, {key: value for key, value in settings.items() if value is not None})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Convert, and tell the parent what its user should know."""
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except ModelError as error:
        _tell({"message": error.message, "hint": error.hint})
        sys.exit(EXIT_MODEL_ERROR)


def _tell(note: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(note)}\n")


if __name__ == "__main__":
    main()
