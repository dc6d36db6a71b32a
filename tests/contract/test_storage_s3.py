"""S3 when it is not at its best: lost answers, storms, cut bodies, stale keys, stores that keep no conditions."""

import contextlib
import io
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError
from tests.contract.s3_stores import use_store
from tests.services.servers import S3Bucket

from deploy.native.faulty_s3 import Fault, FaultyS3
from nightmill.errors import ConfigError, StorageError
from nightmill.storage import ObjectExistsError, PreconditionFailedError, SourceChangedError
from nightmill.storage.s3 import S3Storage
from nightmill.storage.s3_errors import S3Error
from nightmill.storage.s3_settings import S3Settings
from nightmill.storage.s3_staged import TOKEN_KEY

MIB = 2**20


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightmill.storage.s3_connection._FIRST_DELAY_S", 0.001)
    monkeypatch.setattr("nightmill.storage.s3_connection._MAX_DELAY_S", 0.05)


@pytest.fixture
def faulty(moto_s3: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """moto behind a proxy; what the environment names is the proxy."""
    with FaultyS3(moto_s3.endpoint.url) as proxy:
        use_store(monkeypatch, moto_s3, proxy.url)
        yield proxy


@pytest.fixture
def root(faulty: FaultyS3, moto_s3: S3Bucket) -> str:
    """A prefix behind the proxy."""
    return f"s3://{moto_s3.bucket}/prefix"


@pytest.fixture
def store(s3_server: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix on each kind of server."""
    use_store(monkeypatch, s3_server)
    return f"s3://{s3_server.bucket}/prefix"


def put(uri: str, data: bytes, *, etag: str | None = None, new: bool = True, storage: S3Storage | None = None) -> str:
    with (storage or S3Storage()).stage(uri) as staged:
        staged.file.write(data)
        return (staged.create() if new else staged.replace(etag=etag)).etag


def get(uri: str) -> bytes:
    with S3Storage().open_input(uri) as file:
        return bytes(file.read())


# Writes whose answer is lost.


def test_a_create_whose_answer_was_lost_is_no_conflict(faulty: FaultyS3, root: str) -> None:
    faulty.plan(Fault.LOST_ANSWER, method="PUT")
    with S3Storage().stage(f"{root}/x") as staged:
        staged.file.write(b"mine")
        info = staged.create()
    assert len(faulty.seen("PUT")) == 2
    assert S3Storage().stat(f"{root}/x") == info
    with pytest.raises(ObjectExistsError):
        put(f"{root}/x", b"mine")


def test_a_create_that_was_lost_before_somebody_elses_is_a_conflict(faulty: FaultyS3, root: str) -> None:
    put(f"{root}/x", b"theirs")
    faulty.plan(Fault.LOST_ANSWER, method="PUT")
    with pytest.raises(ObjectExistsError):
        put(f"{root}/x", b"mine")
    assert get(f"{root}/x") == b"theirs"


def test_a_replacement_whose_answer_was_lost_is_no_conflict(faulty: FaultyS3, root: str) -> None:
    old = put(f"{root}/x", b"old")
    faulty.plan(Fault.LOST_ANSWER, method="PUT")
    new = put(f"{root}/x", b"new", etag=old, new=False)
    assert S3Storage().stat(f"{root}/x").etag == new  # type: ignore[union-attr]
    with pytest.raises(PreconditionFailedError):
        put(f"{root}/x", b"newer", etag=old, new=False)


REFUSALS = [Fault.SLOW_DOWN, Fault.ERROR, Fault.CONFLICT, Fault.LOST_REQUEST]


@pytest.mark.parametrize("fault", REFUSALS, ids=lambda fault: fault.name)
def test_writes_are_tried_again(fault: Fault, faulty: FaultyS3, root: str) -> None:
    faulty.plan(fault, method="PUT", times=3)
    put(f"{root}/x", b"data")
    assert len(faulty.seen("PUT")) == 4
    assert get(f"{root}/x") == b"data"
    faulty.plan(fault, method="DELETE", times=2)
    S3Storage().delete(f"{root}/x")
    assert S3Storage().list(root) == []


# Reads.


READS = [Fault.SLOW_DOWN, Fault.ERROR, Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.TRUNCATED, Fault.RESET_MIDWAY]


@pytest.mark.parametrize("fault", READS, ids=lambda fault: fault.name)
def test_reads_and_listings_are_tried_again(fault: Fault, faulty: FaultyS3, root: str) -> None:
    data = random.Random(2).randbytes(2 * MIB)
    put(f"{root}/x", data)
    faulty.plan(fault, method="GET", containing="/x", times=2)
    with S3Storage().open_input(f"{root}/x") as file:
        assert file.read(100) == data[:100]
        faulty.plan(fault, method="GET", containing="/x", times=3)
        file.seek(MIB)
        assert file.read() == data[MIB:]
    faulty.plan(fault, method="GET", containing="list-type", times=2)
    assert [info.size_bytes for info in S3Storage().list(root)] == [2 * MIB]
    faulty.plan(fault, method="HEAD", times=2)
    assert S3Storage().stat(f"{root}/x") is not None


def test_a_storm_over_many_threads_loses_nothing(faulty: FaultyS3, root: str) -> None:
    faulty.storm = 0.5
    names = [f"{root}/{number}" for number in range(60)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: put(name, name.encode()), names))
        assert list(pool.map(get, names)) == [name.encode() for name in names]
    refused = sum(request.fault is Fault.SLOW_DOWN for request in faulty.requests)
    assert refused > 60
    faulty.storm = 0
    assert sorted(info.uri for info in S3Storage().list(root)) == sorted(names)


def test_patience_ends_and_says_so(faulty: FaultyS3, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "4")
    faulty.plan(Fault.SLOW_DOWN, times=100)
    with pytest.raises(S3Error) as caught:
        S3Storage().stat(f"{root}/x")
    assert len(faulty.seen("HEAD")) == 4
    for word in (f"cannot read {root}/x", "503", "given up after 4 tries", "Is the store up", faulty.url):
        assert word in str(caught.value)


@pytest.mark.parametrize("when", ["at once", "later", "gone"])
def test_an_input_overwritten_while_it_is_read_is_told(when: str, store: str) -> None:
    table = pa.table({"a": [str(i) * 50 for i in range(60_000)]})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=10_000, compression="none", use_dictionary=False)
    old = put(f"{store}/x", buffer.getvalue())

    def overwrite() -> None:
        S3Storage().delete(f"{store}/x")
        if when != "gone":
            put(f"{store}/x", buffer.getvalue()[:-1] + b"2")

    if when == "at once":
        overwrite()
        with pytest.raises(SourceChangedError, match="x was overwritten: its etag is"):
            S3Storage().open_input(f"{store}/x", etag=old)
        return
    with S3Storage().open_input(f"{store}/x") as file:
        batches = pq.ParquetFile(file, pre_buffer=False, buffer_size=MIB).iter_batches(1000, use_threads=False)
        next(batches)
        overwrite()
        with pytest.raises(SourceChangedError, match="x is gone" if when == "gone" else "x was overwritten"):
            list(batches)


def test_a_small_object_is_one_request_and_a_column_few(faulty: FaultyS3, root: str) -> None:
    put(f"{root}/small", b"x" * 50_000)
    faulty.requests.clear()
    assert get(f"{root}/small") == b"x" * 50_000
    assert len(faulty.requests) == 1
    buffer = io.BytesIO()
    columns = {name: [random.Random(i).randbytes(1000) for i in range(4000)] for name in "abcd"}
    pq.write_table(pa.table(columns), buffer, compression="none", use_dictionary=False)
    put(f"{root}/big", buffer.getvalue())
    faulty.requests.clear()
    with S3Storage().open_input(f"{root}/big") as file:
        stream = pq.ParquetFile(file, pre_buffer=False, buffer_size=MIB).iter_batches(
            500, columns=["a", "c"], use_threads=False
        )
        assert sum(batch.num_rows for batch in stream) == 4000
    # 4 MB each of two columns, in windows of 1, 2 and 4 MiB: at most twice what is used.
    assert len(faulty.requests) <= 8
    asked = [r.headers["Range"].removeprefix("bytes=").split("-") for r in faulty.requests[1:]]
    assert sum(int(last) - int(first) + 1 for first, last in asked) < 16 * MIB


def test_an_answer_shorter_than_it_says_is_asked_for_again(faulty: FaultyS3, root: str) -> None:
    put(f"{root}/x", LARGE)
    faulty.plan(Fault.SHORTENED, method="GET", times=2)
    with S3Storage().open_input(f"{root}/x") as file:
        faulty.plan(Fault.SHORTENED, method="GET", times=2)
        assert file.read() == LARGE


# Large objects.


@pytest.fixture
def pieces(store: str) -> S3Storage:
    """Large begins at 6 MiB."""
    return S3Storage(replace(S3Settings.from_env(), max_put_bytes=6 * MIB, piece_bytes=5 * MIB, page_keys=2))


LARGE = random.Random(3).randbytes(11 * MIB)


def test_a_large_object_goes_up_in_pieces_and_overwrites_nothing(store: str, pieces: S3Storage) -> None:
    info_etag = put(f"{store}/x", LARGE, storage=pieces)
    info = pieces.stat(f"{store}/x")
    assert info is not None
    assert (info.size_bytes, info.etag) == (len(LARGE), info_etag)
    assert get(f"{store}/x") == LARGE
    with pytest.raises(ObjectExistsError):
        put(f"{store}/x", LARGE[:-1], storage=pieces)
    assert get(f"{store}/x") == LARGE
    new = put(f"{store}/x", LARGE[1:], new=False, storage=pieces)
    assert pieces.stat(f"{store}/x").etag == new  # type: ignore[union-attr]
    assert list(pieces._pages(store, "list_multipart_uploads", "Uploads", *bucket_of(store))) == []


def test_what_the_servers_do_with_a_condition_on_the_completion(s3_server: S3Bucket, store: str) -> None:
    """Ceph 16 keeps none there, so the name is looked at just before. When this fails, it has learned to."""
    bucket, prefix = bucket_of(store)
    client = S3Storage().connection.call("x", store, lambda client: client)
    where = {"Bucket": bucket, "Key": f"{prefix}/x"}
    client.put_object(**where, Body=b"theirs")
    upload = {**where, "UploadId": client.create_multipart_upload(**where)["UploadId"]}
    etag = client.upload_part(**upload, PartNumber=1, Body=b"mine")["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    with contextlib.suppress(ClientError):  # 412
        client.complete_multipart_upload(**upload, MultipartUpload=parts, IfNoneMatch="*")
    keeps = client.get_object(**where)["Body"].read() == b"theirs"
    assert keeps == (s3_server.kind == "moto")


def bucket_of(uri: str) -> tuple[str, str]:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix


def test_uploads_that_a_killed_process_left_are_swept(store: str, pieces: S3Storage) -> None:
    bucket, prefix = bucket_of(store)
    client = pieces.connection.call("x", store, lambda client: client)
    for key in (f"{prefix}/1", f"{prefix}/2", f"{prefix}/a/3", f"{prefix}-other/4"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    put(f"{store}/_nightmill/probe-left", b"", storage=pieces)
    put(f"{store}/_nightmill/job.json", b"", storage=pieces)
    pieces.sweep(store)
    assert [u["Key"] for u in client.list_multipart_uploads(Bucket=bucket)["Uploads"]] == [f"{prefix}-other/4"]
    assert [info.uri for info in pieces.list(store)] == [f"{store}/_nightmill/job.json"]


@pytest.mark.parametrize("query", ["uploads", "partNumber", "uploadId"])
def test_pieces_are_tried_again_and_a_lost_completion_is_no_conflict(query: str, faulty: FaultyS3, root: str) -> None:
    storage = S3Storage(replace(S3Settings.from_env(), max_put_bytes=6 * MIB, piece_bytes=5 * MIB))
    method = "PUT" if query == "partNumber" else "POST"
    faulty.plan(Fault.LOST_ANSWER, method=method, containing=query)
    put(f"{root}/x", LARGE, storage=storage)
    assert get(f"{root}/x") == LARGE
    with pytest.raises(ObjectExistsError):
        put(f"{root}/x", LARGE, storage=storage)
    storage.sweep(root)


def test_listings_of_many_pages(store: str, pieces: S3Storage) -> None:
    for number in range(5):
        put(f"{store}/{number}", b"", storage=pieces)
    assert [info.uri for info in pieces.list(store)] == [f"{store}/{number}" for number in range(5)]


# Stores that keep no conditions.


def test_conditions_are_tried_once_and_leave_nothing(
    store: str, s3_server: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_store(monkeypatch, s3_server, probing=True)
    assert all(S3Storage().creates_atomically(f"{store}/out") for _ in range(3))
    assert S3Storage().list(store) == []


def test_a_store_that_ignores_conditions_is_found_out(
    faulty: FaultyS3, moto_s3: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_store(monkeypatch, moto_s3, faulty.url, probing=True)
    faulty.ignores_conditions = True
    root = f"s3://{moto_s3.bucket}/prefix"
    assert not S3Storage().creates_atomically(root)
    tried = len(faulty.requests)
    assert not S3Storage().creates_atomically(root)
    assert len(faulty.requests) == tried, "tried once"
    assert S3Storage().list(root) == []
    # Without a race they are kept all the same.
    old = put(f"{root}/x", b"first")
    with pytest.raises(ObjectExistsError):
        put(f"{root}/x", b"second")
    assert put(f"{root}/x", b"third", etag=old, new=False) != old
    with pytest.raises(PreconditionFailedError):
        put(f"{root}/x", b"fourth", etag=old, new=False)
    assert get(f"{root}/x") == b"third"


def test_conditions_may_be_stated(faulty: FaultyS3, moto_s3: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTMILL_S3_CONDITIONAL_WRITES", "no")
    assert not S3Storage().creates_atomically(f"s3://{moto_s3.bucket}/x")
    monkeypatch.setenv("NIGHTMILL_S3_CONDITIONAL_WRITES", "yes")
    assert S3Storage().creates_atomically(f"s3://{moto_s3.bucket}/x")
    assert faulty.requests == []


# Keys and clients.


def test_case_I100_credentials_that_expire_are_renewed_while_it_runs(
    faulty: FaultyS3, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`credential_process` gives a key that is about to expire, a new one each time it is asked."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    script = tmp_path / "keys.sh"
    script.write_text(
        f"n=$(($(cat {counter}) + 1)); echo $n > {counter}; expires=$(date -u -d '+60 seconds' +%Y-%m-%dT%H:%M:%SZ)\n"
        'printf \'{"Version":1,"AccessKeyId":"AKIA%s","SecretAccessKey":"s","SessionToken":"t","Expiration":"%s"}\''
        " $n $expires\n"
    )
    (tmp_path / "config").write_text(f"[profile rolling]\ncredential_process = sh {script}\nregion = us-east-1\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "rolling")
    for number in range(4):
        put(f"{root}/{number}", b"")
    keys = {request.access_key for request in faulty.seen("PUT", "/prefix/")}
    assert len(keys) >= 4
    assert all(key.startswith("AKIA") for key in keys)


def test_keys_that_were_rotated_in_their_file_are_read_again(
    faulty: FaultyS3, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def rotate(key: str) -> None:
        (tmp_path / "credentials").write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")

    rotate("OLD")
    put(f"{root}/1", b"")
    rotate("NEW")
    faulty.plan(Fault.EXPIRED, method="PUT", containing="/2")
    put(f"{root}/2", b"")
    assert [r.access_key for r in faulty.seen("PUT", "/prefix/")] == ["OLD", "OLD", "NEW"]
    faulty.plan(Fault.EXPIRED, times=100)
    with pytest.raises(S3Error, match=r"(?s)ExpiredToken.*Get new credentials"):
        put(f"{root}/3", b"")


def test_one_client_serves_threads_and_forked_children(store: str) -> None:
    put(f"{store}/x", b"data" * 100_000)
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: get(f"{store}/x"), range(64))) == {b"data" * 100_000}
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=lambda: results.put(get(f"{store}/x") == b"data" * 100_000)) for _ in range(3)]
    for child in children:
        child.start()
    own = [get(f"{store}/x") for _ in range(10)]
    assert [results.get(timeout=60) for _ in children] == [True] * 3
    for child in children:
        child.join()
    assert set(own) == {b"data" * 100_000}


def test_a_fork_while_another_thread_makes_a_client(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock held by a thread that the child has not must not hold the child."""
    entered, leave = threading.Event(), threading.Event()

    def slow(settings: S3Settings) -> object:
        entered.set()
        leave.wait(60)
        raise StorageError("no client")

    settings = S3Settings.from_env()
    with monkeypatch.context() as patch:
        patch.setattr("nightmill.storage.s3_connection._make", slow)
        other = replace(settings, region="eu-west-1")
        thread = threading.Thread(target=told, args=(lambda: S3Storage(other).stat(f"{store}/x"),))
        thread.start()
        entered.wait(60)
        patch.undo()
        child = multiprocessing.get_context("fork").Process(target=lambda: S3Storage().stat(f"{store}/x"))
        child.start()
        child.join(60)
        code, alive = child.exitcode, child.is_alive()
        if alive:
            child.kill()
        leave.set()
        thread.join()
    assert (alive, code) == (False, 0)


# What people read.


def told(call: Callable[[], object]) -> str:
    with pytest.raises(StorageError) as caught:
        call()
    return str(caught.value)


def test_a_missing_bucket_and_object_are_named(store: str) -> None:
    assert "there is no such object" in told(lambda: S3Storage().open_input(f"{store}/none"))
    for call in (
        lambda: S3Storage().list("s3://no-such-bucket-here/x"),
        lambda: put("s3://no-such-bucket-here/x", b""),
    ):
        message = told(call)
        for word in ("s3://no-such-bucket-here/", "NoSuchBucket", "Create the bucket no-such-bucket-here"):
            assert word in message
    assert S3Storage().stat("s3://no-such-bucket-here") is None


def test_a_wrong_key_is_told_with_its_name(ceph_s3: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    use_store(monkeypatch, ceph_s3)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NOBODY")
    message = told(lambda: S3Storage().list(f"s3://{ceph_s3.bucket}"))
    for word in ("cannot list", "403", "InvalidAccessKeyId", "key NOBODY", "AWS_SECRET_ACCESS_KEY"):
        assert word in message
    use_store(monkeypatch, ceph_s3)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-2")  # a client of its own, which has not read the right one
    message = told(lambda: put(f"s3://{ceph_s3.bucket}/x", b""))
    assert "SignatureDoesNotMatch" in message
    assert "wrong-secret" not in message


def test_no_keys_at_all(moto_s3: S3Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_store(monkeypatch, moto_s3)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_REGION", "eu-south-1")
    message = told(lambda: S3Storage().list(f"s3://{moto_s3.bucket}"))
    assert "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in message
    with monkeypatch.context() as patch:
        patch.setenv("AWS_PROFILE", "nowhere")
        assert "nowhere" in told(lambda: S3Storage().list(f"s3://{moto_s3.bucket}"))


def test_a_mistyped_endpoint_is_told_soon(monkeypatch: pytest.MonkeyPatch, moto_s3: S3Bucket) -> None:
    use_store(monkeypatch, moto_s3, "http://127.0.0.1:9")
    monkeypatch.setattr("nightmill.storage.s3_connection._NEVER_REACHED_S", 0.3)
    message = told(lambda: S3Storage().stat(f"s3://{moto_s3.bucket}/x"))
    assert "no usable answer from http://127.0.0.1:9" in message
    assert "is AWS_ENDPOINT_URL_S3 (http://127.0.0.1:9) right?" in message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AWS_ENDPOINT_URL_S3", "localhost:9000", "AWS_ENDPOINT_URL_S3: 'localhost:9000' is not a URL"),
        ("AWS_ENDPOINT_URL", "ftp://x", "AWS_ENDPOINT_URL: 'ftp://x'"),
        ("AWS_MAX_ATTEMPTS", "many", "AWS_MAX_ATTEMPTS: 'many'"),
        ("NIGHTMILL_S3_ADDRESSING", "dns", "is not one of auto, path, virtual"),
        ("NIGHTMILL_S3_CONDITIONAL_WRITES", "maybe", "is not one of auto, yes, no"),
        ("NIGHTMILL_S3_RETRY_S", "-1", "NIGHTMILL_S3_RETRY_S: '-1'"),
        ("NIGHTMILL_S3_RETRY_S", "nan", "NIGHTMILL_S3_RETRY_S: 'nan'"),
    ],
)
def test_bad_settings_are_named(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("'", ".")):
        S3Settings.from_env({name: value})


def test_settings_come_from_the_usual_variables() -> None:
    settings = S3Settings.from_env(
        {
            "AWS_ENDPOINT_URL": "http://general:1",
            "AWS_ENDPOINT_URL_S3": "http://minio:9000/",
            "AWS_DEFAULT_REGION": "eu-west-1",
            "AWS_MAX_ATTEMPTS": "3",
            "AWS_PROFILE": "",
        }
    )
    assert (settings.endpoint_url, settings.region, settings.max_attempts) == ("http://minio:9000", "eu-west-1", 3)
    assert settings.path_style
    assert settings.profile is None
    assert not S3Settings.from_env({}).path_style
    assert not S3Settings.from_env({"AWS_ENDPOINT_URL": "https://x", "NIGHTMILL_S3_ADDRESSING": "virtual"}).path_style


# The spool.


def test_a_full_temporary_folder_is_explained_and_nothing_is_uploaded(store: str, tmp_path: Path) -> None:
    code = f"""
import resource, sys, pyarrow as pa, pyarrow.parquet as pq
from nightmill.storage import open_storage
from nightmill.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, {2**40}))
table = pa.table({{"a": [str(i) * 20 for i in range(100_000)]}})
try:
    with open_storage(sys.argv[1]).stage(sys.argv[1]) as staged:
        pq.write_table(table, staged.file, compression="none")
        staged.create()
except StorageError as error:
    sys.exit(str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, f"{store}/p.parquet"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 1
    for word in ("p.parquet", f"no space left in the temporary folder {tmp_path}", "Point TMPDIR at a larger disk"):
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert S3Storage().list(store) == []


def test_metadata_carries_the_token_and_the_length_is_known(faulty: FaultyS3, root: str) -> None:
    put(f"{root}/x", b"12345")
    (request,) = faulty.seen("PUT")
    assert request.headers[f"x-amz-meta-{TOKEN_KEY}"]
    assert request.headers["Content-Length"] == "5"
    assert "Content-MD5" in request.headers
    assert "Transfer-Encoding" not in request.headers
    assert not any(name.lower().startswith(("x-amz-sdk-checksum", "x-amz-trailer")) for name in request.headers)
