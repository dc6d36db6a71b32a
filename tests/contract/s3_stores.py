"""S3 stores as the tests of storage use them."""

import os

import pytest
from tests.services.servers import S3Bucket


def use_store(
    monkeypatch: pytest.MonkeyPatch, bucket: S3Bucket, url: str | None = None, *, probing: bool = False
) -> None:
    """Have this process find the bucket's store, or a proxy at `url` in front of it, by the environment alone.

    moto is told to keep conditions unless `probing`: every test has a bucket of its own, and a probe is 25 requests.
    """
    for name in list(os.environ):
        if name.startswith(("AWS_", "NIGHTMILL_S3_")):
            monkeypatch.delenv(name)
    for name, value in bucket.env.items():
        monkeypatch.setenv(name, value)
    if bucket.kind == "moto" and not probing:
        monkeypatch.setenv("NIGHTMILL_S3_CONDITIONAL_WRITES", "yes")
    if url is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
