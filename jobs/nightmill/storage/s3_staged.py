"""An upload: put together in a spool, published by one conditional write, or thrown away.

Every upload carries a token of its own in the object's metadata. When the answer to a write is lost, the next try meets
its own object and is refused (412); the token tells that from somebody else's.
"""

import base64
import contextlib
import hashlib
import io
import secrets
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from nightmill.errors import StorageError
from nightmill.storage.location import bucket_and_key
from nightmill.storage.protocol import ObjectExistsError, ObjectInfo, PreconditionFailedError
from nightmill.storage.s3_connection import S3Connection
from nightmill.storage.s3_errors import S3Error
from nightmill.storage.s3_probe import conditions_below
from nightmill.storage.s3_reader import plain_etag
from nightmill.storage.spool import SpoolView, open_spool, spool_error

if TYPE_CHECKING:
    import pyarrow as pa

TOKEN_KEY = "nightmill-write"
_MAX_PIECES = 10_000  # S3's limit
_MAX_UPLOADS = 5  # of one object in pieces, begun anew
_ANEW = frozenset({"ConditionalRequestConflict", "NoSuchUpload"})  # it met another write; a sweep ended it


class S3StagedObject:
    """What `S3Storage.stage` gives."""

    def __init__(self, connection: S3Connection, uri: str) -> None:
        self._connection = connection
        self._uri = uri
        self._bucket, self._key = bucket_and_key(uri)
        self._token = secrets.token_hex(16)
        self._spool = open_spool()

    @property
    def file(self) -> BinaryIO:
        """The spool, open for writing."""
        return self._spool

    def open_input(self) -> "pa.NativeFile":
        """Read the spool back."""
        import pyarrow as pa

        return pa.PythonFile(SpoolView(self._spool), mode="r")

    def create(self) -> ObjectInfo:
        """Publish by a write that is refused when the name is taken."""
        if not conditions_below(self._connection, self._uri).create:
            if self._head() is not None:  # the best there is: not atomic
                raise ObjectExistsError(f"{self._uri} exists already")
            return self._publish({})
        try:
            return self._publish({"IfNoneMatch": "*"})
        except ObjectExistsError as refusal:
            return self._ours(refusal)
        except S3Error as error:
            if error.http_status != 412:
                raise
            return self._ours(ObjectExistsError(f"{self._uri} exists already"))

    def replace(self, *, etag: str | None = None) -> ObjectInfo:
        """Publish over what is there, if that is what `etag` says."""
        if etag is None:
            return self._publish({})
        refusal = PreconditionFailedError(f"{self._uri} has changed: its etag is not {etag} any more")
        form = conditions_below(self._connection, self._uri).replace
        if form is None:
            current = self._head()  # the best there is: not atomic
            if current is None or plain_etag(current["ETag"]) != etag:
                raise refusal
            return self._publish({})
        try:
            return self._publish({"IfMatch": form.format(etag)})
        except S3Error as error:
            if error.http_status == 412 or error.s3_code == "NoSuchKey":
                return self._ours(refusal)
            raise

    def _publish(self, condition: dict[str, str]) -> ObjectInfo:
        size = self._spool.seek(0, io.SEEK_END)
        if size > self._connection.settings.max_put_bytes:
            etag = self._put_pieces(size, condition)
        else:
            etag = self._put(size, condition)
        return ObjectInfo(uri=self._uri, size_bytes=size, etag=etag)

    def _put(self, size: int, condition: dict[str, str]) -> str:
        fields = self._target | condition | {"Metadata": {TOKEN_KEY: self._token}, "ContentLength": size}
        fields["ContentMD5"] = self._md5(0, size)  # any store checks it, over any proxy

        def request(client: Any) -> Any:
            self._spool.seek(0)
            return client.put_object(Body=self._spool, **fields)

        etag = plain_etag(self._connection.call("write", self._uri, request).get("ETag") or "")
        return etag or self._etag_that_stands()

    def _put_pieces(self, size: int, condition: dict[str, str]) -> str:
        """In pieces, with the condition on their completion; anew when that met another conditional write."""
        for number in range(1, _MAX_UPLOADS + 1):
            try:
                return self._put_pieces_once(size, condition)
            except S3Error as error:
                if error.s3_code == "NoSuchUpload" and (ours := self._our_object()) is not None:
                    return ours.etag  # it was completed, and the answer got lost
                if error.s3_code not in _ANEW or number == _MAX_UPLOADS:
                    raise
        raise AssertionError("unreachable")

    def _put_pieces_once(self, size: int, condition: dict[str, str]) -> str:
        call, uri = self._connection.call, self._uri
        fields = self._target | {"Metadata": {TOKEN_KEY: self._token}}
        upload = self._target | {
            "UploadId": call("write", uri, lambda client: client.create_multipart_upload(**fields))["UploadId"]
        }
        try:
            pieces = [self._put_piece(number, start, end, upload) for number, start, end in self._cuts(size)]
            parts = {"MultipartUpload": {"Parts": pieces}}
            self._look_before_completion(condition)
            done = call("write", uri, lambda client: client.complete_multipart_upload(**upload, **parts, **condition))
        except BaseException:
            with contextlib.suppress(S3Error):  # what is left, a sweep finds
                call("clean", uri, lambda client: client.abort_multipart_upload(**upload))
            raise
        etag = plain_etag(done.get("ETag") or "")
        return etag or self._etag_that_stands()  # Ceph leaves it out, up to 16 at least

    def _etag_that_stands(self) -> str:
        ours = self._our_object()
        if ours is None:
            raise StorageError(f"{self._uri} was overwritten in the moment in which it was written")
        return ours.etag

    def _look_before_completion(self, condition: dict[str, str]) -> None:
        """Not all who keep a condition on PUT keep it here: not atomic, but an upload of this size lasts minutes."""
        elsewhere = self._connection.settings.endpoint_url is not None
        if "IfNoneMatch" in condition and elsewhere and self._head() is not None:
            raise ObjectExistsError(f"{self._uri} exists already")

    def _cuts(self, size: int) -> Iterator[tuple[int, int, int]]:
        length = max(self._connection.settings.piece_bytes, -(-size // _MAX_PIECES))
        for number, start in enumerate(range(0, size, length), 1):
            yield number, start, min(start + length, size)

    def _put_piece(self, number: int, start: int, end: int, upload: dict[str, str]) -> dict[str, Any]:
        self._spool.seek(start)
        data = self._spool.read(end - start)
        fields = {"PartNumber": number, "Body": data, "ContentMD5": self._md5(start, end)}
        answer = self._connection.call("write", self._uri, lambda client: client.upload_part(**upload, **fields))
        return {"ETag": answer["ETag"], "PartNumber": number}

    def _md5(self, start: int, end: int) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        self._spool.seek(start)
        while start < end:
            data = self._spool.read(min(2**20, end - start))
            digest.update(data)
            start += len(data)
        return base64.b64encode(digest.digest()).decode()

    def _ours(self, refusal: Exception) -> ObjectInfo:
        """The object that stands, if it is what an earlier try of this very write has put there."""
        ours = self._our_object()
        if ours is None:
            raise refusal
        return ours

    def _our_object(self) -> ObjectInfo | None:
        head = self._head()
        if head is None or head.get("Metadata", {}).get(TOKEN_KEY) != self._token:
            return None
        return ObjectInfo(uri=self._uri, size_bytes=head["ContentLength"], etag=plain_etag(head["ETag"]))

    def _head(self) -> Any:
        try:
            return self._connection.call("read", self._uri, lambda client: client.head_object(**self._target))
        except S3Error as error:
            if error.http_status == 404:
                return None
            raise

    @property
    def _target(self) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._key}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what was not flushed is not wanted any more
            self._spool.close()
        if isinstance(error, OSError):
            raise spool_error(error, self._uri) from error
