"""`--model fake:{…}`: the scripted engine and a tokenizer of numbers, behind the real command line.

Run as a program it is `nightmill` with that one addition, so that tests can kill a real process:

    FAKE_TOKENIZER=dir python tests/integration/fake_model.py run in.parquet -o out --model 'fake:{"step_s": 0.01}'
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker import loaded_model
from nightmill_worker.embedded import LoadedModel
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.scripted_engine import Script

VOCAB = 1000
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def make_tokenizer(directory: Path, *, chat: bool = False) -> Path:
    """A tokenizer whose words are numbers: "12 7" is [12, 7]; any other word is 1."""
    directory.mkdir(parents=True, exist_ok=True)
    backend = Backend(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(directory / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE} if chat else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text("{}")
    return directory


def fake_model(spec: ModelSpec, tokenizer_dir: Path) -> LoadedModel:
    """What `load_model` gives for `fake:{…}`."""
    fields = {"num_pages": 4096} | json.loads(spec.model.removeprefix("fake:") or "{}")
    fields["traps"] = {int(token): what for token, what in fields.get("traps", {}).items()}
    if "deaths_dir" in fields:
        fields["deaths_dir"] = Path(fields["deaths_dir"])
    journal = os.environ.get("FAKE_JOURNAL")  # not in the name, which is part of the job's specification
    return LoadedModel(
        name="fake",
        digest="fake-digest",
        directory=tokenizer_dir,
        tokenizer=Tokenizer.load(tokenizer_dir),
        runner_config=Script(vocab_size=VOCAB, journal=Path(journal) if journal else None, **fields),
    )


def load_fake_model(
    spec: ModelSpec, engine: EngineOptions, *, progress: Callable[[str], None], pins: bool = False
) -> LoadedModel:
    """In place of load_model."""
    return fake_model(spec, Path(os.environ["FAKE_TOKENIZER"]))


if __name__ == "__main__":
    loaded_model.load_model = load_fake_model
    from nightmill.cli.main import main

    main()
