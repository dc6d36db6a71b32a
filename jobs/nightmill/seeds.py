"""The seed of one request: a function of the row's place in the job, never of when or with whom it runs."""

import hashlib


def request_seed(job_seed: int, source_name: str, row_index: int, sample_index: int = 0) -> int:
    """Derive a seed in [0, 2^63): unsigned for the engine, and an int64 column holds it in every reader."""
    # The name goes last: it is the only part of free form, so no two rows spell the same key.
    key = f"{job_seed}\x00{row_index}\x00{sample_index}\x00{source_name}"
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, person=b"nightmill-seed").digest()
    return int.from_bytes(digest, "little") >> 1


def explicit_seed(seed: int) -> int:
    """A seed that a row gives itself, as the engine's unsigned 64 bits."""
    return seed % 2**64


def column_seed(seed: int) -> int:
    """The same 64 bits as a signed number: what the int64 output column holds, and what gives the same draw again."""
    return seed - 2**64 if seed >= 2**63 else seed
