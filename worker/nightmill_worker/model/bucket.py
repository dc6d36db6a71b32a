"""Models in an object store: `s3://bucket/prefix` copied once into the cache."""

import hashlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from nightmill.errors import ModelError
from nightmill.storage.s3_connection import client_config
from nightmill.storage.s3_settings import S3Settings
from nightmill_worker.model.cache import cached_directory

_SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken")


def bucket_model(uri: str, cache: Path, with_weights: bool, progress: Callable[[str], None]) -> Path:
    """Return a local copy of the model's files directly under the prefix.

    The key holds every object's name, size and ETag: a changed object makes a new copy.

    Raises:
        ModelError: no such bucket or prefix, no access, no answer.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    parts = urlsplit(uri)
    bucket, prefix = parts.netloc, parts.path.strip("/")
    wanted = (*_SMALL, ".safetensors") if with_weights else _SMALL
    try:
        client = _client()
        objects = _list(client, bucket, f"{prefix}/" if prefix else "")
        files = {name: entry for name, entry in objects.items() if PurePosixPath(name).suffix in wanted}
        if not files:
            raise ModelError(
                f"there are no model files under {uri}"
                + (f" (it has {', '.join(sorted(objects)[:3])})" if objects else ""),
                hint="the prefix must be the folder that holds config.json",
            )
        identity = "\n".join(f"{name} {entry['Size']} {entry['ETag']}" for name, entry in sorted(files.items()))
        key = "s3-" + hashlib.sha256(f"{bucket}/{prefix}\n{identity}".encode()).hexdigest()[:24]

        def build(directory: Path) -> None:
            for number, (name, entry) in enumerate(sorted(files.items()), 1):
                progress(f"copying {uri.rstrip('/')}/{name} ({number} of {len(files)}, {entry['Size'] >> 20} MiB)")
                client.download_file(bucket, entry["Key"], str(directory / name))

        return cached_directory(cache, key, build)
    except (ClientError, BotoCoreError, Boto3Error) as error:
        raise ModelError(f"{uri} could not be read: {error}", hint=_hint()) from error


def _client() -> Any:
    import boto3

    settings = S3Settings.from_env()
    tries = {"total_max_attempts": settings.max_attempts or 8, "mode": "standard"}  # nothing of ours repeats a download
    config = client_config(settings, retries=tries)
    return boto3.client("s3", endpoint_url=settings.endpoint_url, config=config)


def _list(client: Any, bucket: str, prefix: str) -> dict[str, dict[str, Any]]:
    """Objects directly under the prefix, by name."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, Delimiter="/")
    entries = (entry for page in pages for entry in page.get("Contents", ()))
    return {entry["Key"][len(prefix) :]: entry for entry in entries if entry["Key"] != prefix}


def _hint() -> str:
    endpoint = S3Settings.from_env().endpoint_url
    return f"check AWS_ENDPOINT_URL ({endpoint or 'not set: AWS itself'}), AWS_ACCESS_KEY_ID and AWS_REGION"
