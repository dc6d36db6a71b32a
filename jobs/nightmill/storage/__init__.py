"""Where inputs are read and outputs are written: one small protocol, and the local disk behind it."""

from nightmill.storage.local import LocalStorage, absolute, open_storage
from nightmill.storage.protocol import (
    ObjectExistsError,
    ObjectInfo,
    PreconditionFailedError,
    SourceChangedError,
    StagedObject,
    Storage,
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
    "open_storage",
]
