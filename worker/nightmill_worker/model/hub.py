"""Models of the Hugging Face hub, through its own client and cache (`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`)."""

import os
from collections.abc import Callable
from pathlib import Path

from nightmill.errors import ModelError

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]


def hub_model(repo: str, revision: str | None, with_weights: bool, progress: Callable[[str], None]) -> Path:
    """Return the directory of a hub model in the hub's cache, downloading what is missing.

    What is complete in the cache is used without asking the network when `revision` is a commit hash or
    `HF_HUB_OFFLINE` is set, and when the network does not answer.

    Raises:
        ModelError: no such model or revision, no access, or no network and nothing in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{repo} at revision {revision}" if revision else repo
    patterns = [*_SMALL_FILES, "*.safetensors"] if with_weights else _SMALL_FILES
    progress(f"looking for {where} in the hub cache and on {_endpoint()}")
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ModelError(
            f"{where} is gated: this token may not read it", hint="accept its terms, set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no revision {revision}", hint="see its page on the hub") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no model {repo}: no such folder here, and none on {_endpoint()} that this token may see",
            hint="check the spelling; for a private model set HF_TOKEN; --model demo needs no hub",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{where} is not a folder here and could not be had from the hub: {_reason(error)}", hint=_hint(where)
        ) from error


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _reason(error: Exception) -> str:
    from huggingface_hub.constants import HF_HUB_CACHE, is_offline_mode

    if is_offline_mode():
        return f"HF_HUB_OFFLINE is set and it is not (whole) in {HF_HUB_CACHE}"
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    return f"{_endpoint()} did not answer ({type(root).__name__}), and it is not (whole) in {HF_HUB_CACHE}"


def _hint(where: str) -> str:
    return (
        f"on a machine with network: `hf download {where.split()[0]}`, and copy its folder here; then give --model "
        "that folder, or set HF_HOME to the copied cache. --model demo needs no hub"
    )
