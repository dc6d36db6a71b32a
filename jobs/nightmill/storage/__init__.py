"""Where inputs are read and outputs are written: one small protocol, and the local disk and S3 behind it."""

from nightmill.storage.local import LocalStorage
from nightmill.storage.location import absolute
from nightmill.storage.opening import open_storage
from nightmill.storage.pinned import pinned
from nightmill.storage.protocol import (
    ObjectExistsError,
    ObjectInfo,
    PreconditionFailedError,
    SourceChangedError,
    StagedObject,
    Storage,
    is_source_lost,
)

__all__ = [
    "LocalStorage",
    "ObjectExistsError",
    "ObjectInfo",
    "PreconditionFailedError",
    "SourceChangedError",
    "StagedObject",
    "Storage",
    "absolute",
    "is_source_lost",
    "open_storage",
    "pinned",
]
