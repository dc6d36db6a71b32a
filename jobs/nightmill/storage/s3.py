"""S3, and what speaks its protocol, as a Storage."""

import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nightmill.storage.location import PROBE_NAME, bucket_and_key
from nightmill.storage.protocol import ObjectInfo
from nightmill.storage.s3_connection import S3Connection
from nightmill.storage.s3_errors import S3Error
from nightmill.storage.s3_probe import conditions_below
from nightmill.storage.s3_reader import open_object, plain_etag
from nightmill.storage.s3_settings import S3Settings
from nightmill.storage.s3_staged import S3StagedObject

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class S3Storage:
    """Objects by `s3://bucket/key`. Safe to use from many threads, and in a forked child."""

    settings: S3Settings = field(default_factory=S3Settings.from_env)

    @property
    def connection(self) -> S3Connection:
        """Requests to this store."""
        return S3Connection(self.settings)

    def open_input(self, uri: str, *, etag: str | None = None) -> "pa.NativeFile":
        """Open for ranged reads, all of one version: an object overwritten meanwhile is an error, not a mixture."""
        return open_object(self.connection, uri, etag)

    def stat(self, uri: str) -> ObjectInfo | None:
        """One HEAD request."""
        bucket, key = bucket_and_key(uri)
        if not key:
            return None
        try:
            head = self.connection.call("read", uri, lambda client: client.head_object(Bucket=bucket, Key=key))
        except S3Error as error:
            if error.http_status == 404:
                return None
            raise
        return ObjectInfo(
            uri=f"s3://{bucket}/{key}", size_bytes=head["ContentLength"], etag=plain_etag(head.get("ETag", ""))
        )

    def list(self, folder: str) -> builtins.list[ObjectInfo]:
        """All pages. Keys that end in a slash stand for folders and are left out."""
        bucket, key = bucket_and_key(folder)
        entries = self._pages(folder, "list_objects_v2", "Contents", bucket, f"{key}/" if key else "")
        found = [
            ObjectInfo(uri=f"s3://{bucket}/{e['Key']}", size_bytes=e["Size"], etag=plain_etag(e.get("ETag", "")))
            for e in entries
            if not e["Key"].endswith("/")
        ]
        return sorted(found, key=lambda info: info.uri)

    def stage(self, uri: str) -> S3StagedObject:
        """Write to a spool; nothing reaches the store before it is published."""
        return S3StagedObject(self.connection, uri)

    def creates_atomically(self, folder: str) -> bool:
        """By what this store did when it was tried."""
        return conditions_below(self.connection, f"{folder}/x").create

    def copy(self, source: str, target: str) -> None:
        """Inside the store; in pieces when it is large."""
        from boto3.s3.transfer import TransferConfig

        (from_bucket, from_key), (bucket, key) = bucket_and_key(source), bucket_and_key(target)
        config = TransferConfig(
            multipart_threshold=self.settings.max_put_bytes, multipart_chunksize=8 * self.settings.piece_bytes
        )
        self.connection.call(
            "copy",
            source,
            lambda client: client.copy({"Bucket": from_bucket, "Key": from_key}, bucket, key, Config=config),
        )

    def delete(self, uri: str) -> None:
        """S3 does not mind when there is none."""
        bucket, key = bucket_and_key(uri)
        try:
            self.connection.call("delete", uri, lambda client: client.delete_object(Bucket=bucket, Key=key))
        except S3Error as error:
            if error.http_status != 404:  # some stores do mind
                raise

    def sweep(self, folder: str) -> None:
        """End uploads in pieces that were never completed: they cost space and cannot be seen. Remove probes."""
        bucket, key = bucket_and_key(folder)
        prefix = f"{key}/" if key else ""
        for upload in self._pages(folder, "list_multipart_uploads", "Uploads", bucket, prefix):
            self._abort(folder, {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]})
        for entry in self._pages(folder, "list_objects_v2", "Contents", bucket, f"{prefix}_nightmill/{PROBE_NAME}"):
            self.delete(f"s3://{bucket}/{entry['Key']}")

    def remove_empty_folders(self, folder: str) -> None:
        """Folders are only names here."""

    def _abort(self, folder: str, upload: dict[str, str]) -> None:
        try:
            self.connection.call("clean", folder, lambda client: client.abort_multipart_upload(**upload))
        except S3Error as error:
            if error.http_status != 404:  # its writer was faster
                raise

    def _pages(self, folder: str, operation: str, field_name: str, bucket: str, prefix: str) -> Iterator[Any]:
        """Entries of all pages; each page is a request that may be tried again on its own."""
        marks: dict[str, str] = {}
        limit = {"MaxKeys" if operation == "list_objects_v2" else "MaxUploads": self.settings.page_keys}
        while True:
            page = self.connection.call(
                "list",
                folder,
                lambda client: getattr(client, operation)(Bucket=bucket, Prefix=prefix, **limit, **marks),  # noqa: B023
            )
            yield from page.get(field_name, ())
            if not page.get("IsTruncated"):
                return
            if operation == "list_objects_v2":
                marks = {"ContinuationToken": page["NextContinuationToken"]}
            else:
                marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
