"""Prompt lengths in tokens, for `nightmill validate --model`: what the feeder would send to the engine. No weights."""

from collections.abc import Sequence
from dataclasses import replace

from nightmill.records import JobSpec
from nightmill.rows import InputRow
from nightmill.states import Tier
from nightmill.validate import CountTokens
from nightmill_worker.feed.requests import RequestMaker, RowRequest
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.source import resolve_model

_NO_LIMIT = 1 << 40


def load_token_counter(spec: JobSpec) -> CountTokens:
    """A function that counts the prompt tokens of rows, template included; rows that cannot be rendered are left out.

    Found by the control plane through the entry point `nightmill.token_counter`.

    Raises:
        ModelError: There is no such model.
        ValidationError: `--chat` for a model without a chat template.
    """
    resolved = resolve_model(replace(spec.model, load_format="dummy"))
    tokenizer = Tokenizer.load(resolved.directory)
    maker = RequestMaker(tokenizer, spec, job_id="-", tier=Tier.NORMAL, max_model_len=_NO_LIMIT)

    def count(rows: Sequence[InputRow]) -> list[int]:
        return [len(made.request.prompt) for made in maker.make(rows) if isinstance(made, RowRequest)]

    return count
