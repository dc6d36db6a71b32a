"""From a location to the storage that holds it."""

from nightmill.storage.local import LocalStorage
from nightmill.storage.location import absolute, is_s3
from nightmill.storage.protocol import Storage


def open_storage(uri: str) -> Storage:
    """Give the storage that holds `uri`. Cheap: nothing is connected yet.

    Raises:
        StorageError: for a scheme that is not supported.
        ConfigError: a variable that says how to reach an object store has a bad value.
    """
    if is_s3(absolute(uri)):
        from nightmill.storage.s3 import S3Storage

        return S3Storage()
    return LocalStorage()
