from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from nightmill.config import Settings
from nightmill.errors import ModelError
from nightmill.records import ModelSpec
from nightmill_worker.model.source import resolve_model

MakeModel = Callable[..., Path]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for name, value in {
        "AWS_ENDPOINT_URL_S3": server,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    client = boto3.client("s3", endpoint_url=server)
    name = f"models-{abs(hash(tmp_path))}"
    client.create_bucket(Bucket=name)
    yield boto3.resource("s3", endpoint_url=server).Bucket(name)
    client.close()


def _upload(bucket: Any, directory: Path, prefix: str) -> str:
    for path in directory.iterdir():
        bucket.upload_file(str(path), f"{prefix}/{path.name}")
    return f"s3://{bucket.name}/{prefix}"


def test_a_prefix_is_copied_once(bucket: Any, make_model: MakeModel, settings: Settings) -> None:
    source = make_model()
    uri = _upload(bucket, source, "team/tiny")
    bucket.put_object(Key="team/tiny/checkpoints/old.safetensors", Body=b"")
    bucket.put_object(Key="team/tiny/README.md", Body=b"")
    told: list[str] = []
    resolved = resolve_model(ModelSpec(model=uri + "/"), settings=settings, progress=told.append)
    assert resolved.name == "tiny"
    assert {p.name: p.read_bytes() for p in resolved.directory.iterdir()} == {
        p.name: p.read_bytes() for p in source.iterdir()
    }
    assert len(told) == 3
    again: list[str] = []
    assert resolve_model(ModelSpec(model=uri), settings=settings, progress=again.append) == resolved
    assert again == []


def test_a_changed_object_makes_a_new_copy(bucket: Any, make_model: MakeModel, settings: Settings) -> None:
    uri = _upload(bucket, make_model(), "tiny")
    old = resolve_model(ModelSpec(model=uri), settings=settings)
    bucket.put_object(Key="tiny/config.json", Body=b'{"model_type": "qwen2"}')
    new = resolve_model(ModelSpec(model=uri), settings=settings)
    assert new.directory != old.directory
    assert new.digest != old.digest


def test_dummy_copies_no_weights(bucket: Any, make_model: MakeModel, settings: Settings) -> None:
    uri = _upload(bucket, make_model(), "tiny")
    resolved = resolve_model(ModelSpec(model=uri, load_format="dummy"), settings=settings)
    assert not resolved.has_weights
    assert resolve_model(ModelSpec(model=uri), settings=settings).has_weights


def test_an_empty_prefix_and_a_missing_bucket(bucket: Any, settings: Settings) -> None:
    with pytest.raises(ModelError, match="there are no model files under"):
        resolve_model(ModelSpec(model=f"s3://{bucket.name}/nothing"), settings=settings)
    with pytest.raises(ModelError, match="AWS_ENDPOINT_URL"):
        resolve_model(ModelSpec(model="s3://no-such-bucket-here/x"), settings=settings)


def test_the_s3_endpoint_goes_before_the_general_one(
    bucket: Any, make_model: MakeModel, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = _upload(bucket, make_model(), "tiny")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert resolve_model(ModelSpec(model=uri), settings=settings).has_weights
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    with pytest.raises(ModelError, match=r"127\.0\.0\.1:9"):
        resolve_model(ModelSpec(model=uri), settings=settings)
