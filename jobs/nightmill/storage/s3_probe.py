"""Which conditional writes a store keeps, found out by trying: not all do, and not all say so."""

import contextlib
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nightmill.storage.location import PROBE_NAME, bucket_and_key
from nightmill.storage.s3_connection import S3Connection
from nightmill.storage.s3_errors import S3Error
from nightmill.storage.s3_reader import plain_etag
from nightmill.storage.s3_settings import S3Settings

RACERS = 8
_ROUNDS = 2
_HIDDEN = "_nightmill"
QUOTED, PLAIN = '"{}"', "{}"  # as HTTP has it; as Ceph compares it, up to 16 at least
_NO_ETAG = "0123456789abcdef0123456789abcdef"

_lock = threading.Lock()
_known: dict[tuple[S3Settings, str], "Conditions"] = {}


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a bucket's store keeps."""

    create: bool  # If-None-Match: *, also when several write at once
    replace: str | None  # If-Match: the form in which it wants an etag; None: not kept


def conditions_below(connection: S3Connection, uri: str) -> Conditions:
    """What holds for writes at or below `uri`. Tried once for each bucket and process; AWS is known to keep both.

    The first call writes small objects under `_nightmill/` near `uri` and removes them.

    Raises:
        S3Error: the store does not let us write there.
    """
    settings = connection.settings
    if settings.conditional_writes != "auto" or settings.endpoint_url is None:
        keeps = settings.conditional_writes != "no"
        return Conditions(create=keeps, replace=QUOTED if keeps else None)
    bucket, key = bucket_and_key(uri)
    with _lock:
        if (settings, bucket) not in _known:
            _known[settings, bucket] = _Probe(connection, bucket, _folder(key)).run()
        return _known[settings, bucket]


def _folder(key: str) -> str:
    """The job's `_nightmill/` that the key is in, or one below the key."""
    before, hidden, _ = f"{key}/".partition(f"{_HIDDEN}/")
    return before + hidden if hidden else f"{key.rpartition('/')[0]}/{_HIDDEN}/".lstrip("/")


class _Probe:
    def __init__(self, connection: S3Connection, bucket: str, folder: str) -> None:
        self._connection = connection
        self._bucket = bucket
        self._key = f"{folder}{PROBE_NAME}{secrets.token_hex(8)}"

    def run(self) -> Conditions:
        keys = [self._key, *(f"{self._key}-{number}" for number in range(_ROUNDS))]
        try:
            etag = plain_etag(self._put(keys[0], {})["ETag"])  # whether we may write at all is not what is asked
            with ThreadPoolExecutor(_ROUNDS) as pool:  # each is a wait for a network
                races = pool.map(self._one_wins, keys[1:])
                refused = self._is_refused(keys[0], {"IfNoneMatch": "*"})
                return Conditions(replace=self._match_form(keys[0], etag), create=refused and all(races))
        finally:
            with ThreadPoolExecutor(len(keys)) as pool:
                pool.map(self._remove, keys)

    def _remove(self, key: str) -> None:
        with contextlib.suppress(S3Error):  # what is left, a sweep finds; what went wrong before is the news
            self._call("clean", lambda client: client.delete_object(Bucket=self._bucket, Key=key))

    def _match_form(self, key: str, etag: str) -> str | None:
        for form in (QUOTED, PLAIN):
            if not self._is_refused(key, {"IfMatch": form.format(_NO_ETAG)}):
                return None
            if not self._is_refused(key, {"IfMatch": form.format(etag)}):
                return form
        return None

    def _one_wins(self, key: str) -> bool:
        """Some stores keep the condition only while nobody else writes."""
        barrier = threading.Barrier(RACERS)

        def write(number: int) -> bool:
            barrier.wait()
            return not self._is_refused(key, {"IfNoneMatch": "*"}, str(number))

        with ThreadPoolExecutor(RACERS) as pool:
            won = sum(pool.map(write, range(RACERS)))
        # An answer that was lost makes the winner meet itself: nobody has won then, and that is no fault.
        return won <= 1

    def _is_refused(self, key: str, condition: dict[str, str], body: str = "") -> bool:
        try:
            self._put(key, condition, body)
        except S3Error as error:
            if error.http_status == 412:
                return True
            if error.http_status in (400, 501):  # "a header you provided implies functionality that is not implemented"
                return False
            raise
        return False

    def _put(self, key: str, condition: dict[str, str], body: str = "") -> Any:
        return self._call(
            "write", lambda client: client.put_object(Bucket=self._bucket, Key=key, Body=body.encode(), **condition)
        )

    def _call(self, action: str, request: Any) -> Any:
        return self._connection.call(action, f"s3://{self._bucket}/{self._key}", request)
