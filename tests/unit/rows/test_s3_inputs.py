"""Inputs by their `s3://` names: which files a job reads, and what its rows call them."""

import io
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.contract.s3_stores import use_store
from tests.services.servers import S3Bucket
from tests.unit.rows.row_inputs import make_spec

from deploy.native.faulty_s3 import Fault, FaultyS3
from nightmill.errors import StorageError, ValidationError
from nightmill.reader.many import map_files
from nightmill.records import JobSpec
from nightmill.rows import job_source_schema
from nightmill.sharding import list_sources, plan_shards, source_name
from nightmill.storage import SourceChangedError, open_storage, pinned

ROOT = "s3://bucket"


@pytest.fixture
def root(moto_s3: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    use_store(monkeypatch, moto_s3)
    return f"s3://{moto_s3.bucket}"


def put(uri: str, rows: int = 3, **options: int) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"prompt": [str(n) for n in range(rows)]}), buffer, **options)
    put_bytes(uri, buffer.getvalue())


def put_bytes(uri: str, data: bytes) -> None:
    with open_storage(uri).stage(uri) as staged:
        staged.file.write(data)
        staged.replace()


def test_prefixes_globs_and_what_is_hidden(root: str) -> None:
    names = ["data/a/1.parquet", "data/a/2.parquet", "data/b/3.parquet", "data/b/x=1/4.jsonl", "data2/5.parquet"]
    for name in [*names, "data/_old/6.parquet", "data/a/.7.parquet", "data/a/_SUCCESS.parquet", "data/a/notes.txt"]:
        put(f"{root}/{name}") if name.endswith("parquet") else put_bytes(f"{root}/{name}", b'{"url": "u"}\n')
    put(f"{root}/odd/[1]?.parquet")
    cases = {
        "data": names[:4],
        "data/": names[:4],
        "": [*names, "odd/[1]?.parquet"],
        "data/*/*.parquet": names[:3],
        "data/**/*.parquet": names[:3],
        "data*/*.parquet": ["data2/5.parquet"],
        "data/a/[2].parquet": ["data/a/2.parquet"],
        "odd/[1]?.parquet": ["odd/[1]?.parquet"],
    }
    for given, found in cases.items():
        sources = list_sources([f"{root}/{given}"])
        assert [source.uri for source in sources] == [f"{root}/{name}" for name in found], given
        for source in sources:
            info = open_storage(source.uri).stat(source.uri)
            assert info is not None
            assert (source.size_bytes, source.etag) == (info.size_bytes, info.etag)
    out = list_sources([f"{root}/data"], output=f"{root}/data/b")
    assert [source.uri for source in out] == [f"{root}/{name}" for name in names[:2]]
    with pytest.raises(ValidationError, match="there is no such file"):
        list_sources([f"{root}/dat"])


@pytest.mark.parametrize(
    ("inputs", "file", "name"),
    [
        (["s3://b/p/"], "s3://b/p/x/1.parquet", "x/1.parquet"),
        (["s3://b/p"], "s3://b/p/x//1.parquet", "x//1.parquet"),
        (["s3://b"], "s3://b/1.parquet", "1.parquet"),
        (["s3://b/p/1.parquet"], "s3://b/p/1.parquet", "1.parquet"),
        (["s3://b/p/*/1.parquet"], "s3://b/p/x/1.parquet", "x/1.parquet"),
        (["s3://b/p/x", "s3://b/p/y/2.parquet"], "s3://b/p/x/1.parquet", "x/1.parquet"),
        (["s3://b/p", "s3://c/p"], "s3://c/p/1.parquet", "c/p/1.parquet"),
        (["s3://b/p", "/data"], "s3://b/p/1.parquet", "s3://b/p/1.parquet"),
        (["s3://b/p", "/data"], "/data/1.parquet", "/data/1.parquet"),
        (["/data"], "/data/x/1.parquet", "x/1.parquet"),
        (["/"], "/data/1.parquet", "data/1.parquet"),
    ],
)
def test_names_of_source_files(inputs: list[str], file: str, name: str) -> None:
    assert source_name(inputs, file) == name


def test_planning_many_files_looks_at_several_at_once_in_order(
    moto_s3: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyS3(moto_s3.endpoint.url) as proxy:
        use_store(monkeypatch, moto_s3, proxy.url)
        root = f"s3://{moto_s3.bucket}/in"
        for number in range(12):
            put(f"{root}/{number:02d}.parquet", rows=number + 1)
        proxy.requests.clear()
        told: list[tuple[int, int]] = []
        sources = list_sources([root], progress=lambda done, total: told.append((done, total)))
        assert [source.num_rows for source in sources] == list(range(1, 13))
        assert told == [(number, 12) for number in range(1, 13)]
        assert len(proxy.seen("GET", ".parquet")) == 12, "a footer is one request, and the listing told the rest"
        shards = plan_shards(sources)
        assert [shard.row_end for shard in shards] == list(range(1, 13))
        assert job_source_schema(sources, spec_of(root)).names == ["prompt"]
        proxy.plan(Fault.TRUNCATED, method="GET", containing="07.parquet", times=2)
        assert plan_shards(sources) == shards


def spec_of(root: str) -> JobSpec:
    return make_spec(root, output=f"{root}-out")


def test_several_at_once_and_the_first_error_in_order() -> None:
    together = threading.Barrier(4)

    def look(uri: str) -> str:
        together.wait(timeout=60)
        if uri > f"{ROOT}/1":
            raise StorageError(uri)
        return uri

    with pytest.raises(StorageError, match=f"{ROOT}/2"):
        map_files(look, [f"{ROOT}/{n}" for n in range(4)])
    order: list[str] = []
    assert map_files(lambda uri: order.append(uri) or uri, ["/a", "/b", "/c"]) == order == ["/a", "/b", "/c"]


def test_a_planned_source_is_read_in_that_version_only(root: str) -> None:
    put(f"{root}/in/1.parquet", rows=5)
    put_bytes(f"{root}/in/2.jsonl", b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "p"}}\n')
    sources = list_sources([f"{root}/in/1.parquet", f"{root}/in/2.jsonl"])
    storage = pinned(sources)
    assert len(plan_shards(sources, storage=storage)) == 2
    put(f"{root}/in/1.parquet", rows=6)
    put_bytes(f"{root}/in/2.jsonl", b'{"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "p"}}\n')
    for source in sources:
        with pytest.raises(SourceChangedError, match=f"{source.uri} was overwritten"):
            plan_shards([source], storage=storage)
    plan_shards(sources)


def test_a_source_that_another_one_took_the_place_of_between_two_looks(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON lines are read with an index of offsets: of this version, or not at all."""
    from nightmill.reader.jsonl import JsonlSource

    uri = f"{root}/x.jsonl"
    put_bytes(uri, b'{"url": "a", "body": 1}\n' * 100)
    source = JsonlSource(uri)
    put_bytes(uri, b'{"url": "bb", "body": 1}\n' * 100)
    with pytest.raises(SourceChangedError):
        list(source.batches(70, 80))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightmill.storage.s3_connection._FIRST_DELAY_S", 0.001)
