"""How places are spelled: a local path, `file://…` or `s3://bucket/key`."""

import os
from collections.abc import Sequence

from nightmill.errors import StorageError

S3_SCHEME = "s3://"
_ALSO_S3 = ("s3a", "s3n")


def absolute(uri: str) -> str:
    """Spell a location so that it means the same from any working directory.

    Local paths become absolute. Keys of an object store stay as they are (`..` is a name there), without slashes at
    the end.

    Raises:
        StorageError: for a scheme that is not supported, or no bucket.
    """
    if not uri:
        raise StorageError("an empty name is no location", hint="Give a path, or s3://bucket/prefix.")
    scheme, separator, rest = uri.partition("://")
    if not separator:
        # Path.absolute() keeps "..", resolve() follows links.
        return os.path.abspath(os.path.expanduser(uri))  # noqa: PTH100, PTH111
    if scheme == "file":
        return os.path.abspath("/" + rest.lstrip("/"))  # noqa: PTH100
    if scheme == "s3":
        if not rest.partition("/")[0]:
            raise StorageError(f"{uri} names no bucket", hint="Give s3://bucket/prefix.")
        return S3_SCHEME + rest.rstrip("/")
    hint = f"Write s3://{rest}." if scheme in _ALSO_S3 else "Give a local path, or s3://bucket/prefix."
    raise StorageError(f"{uri}: locations that begin with {scheme}:// are not supported", hint=hint)


def is_s3(uri: str) -> bool:
    """Whether an absolute location is one of an object store."""
    return uri.startswith(S3_SCHEME)


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Of an `s3://` location; the key is empty for the bucket itself."""
    bucket, _, key = absolute(uri).removeprefix(S3_SCHEME).partition("/")
    return bucket, key


def segments(uri: str) -> list[str]:
    """An absolute location as names from its root down; the root is `/` or `s3://`."""
    root, rest = (S3_SCHEME, uri.removeprefix(S3_SCHEME)) if is_s3(uri) else ("/", uri.strip("/"))
    return [root, *rest.split("/")] if rest else [root]


def joined(names: Sequence[str]) -> str:
    """The opposite of `segments`."""
    return names[0] + "/".join(names[1:]) if names else ""


PROBE_NAME = "probe-"


def is_probe(uri: str) -> bool:
    """Whether this is an object by which somebody finds out what a store can do, or was about to when killed."""
    return segments(uri)[-2:-1] == ["_nightmill"] and segments(uri)[-1].startswith(PROBE_NAME)
