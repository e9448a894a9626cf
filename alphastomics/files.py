"""Files that are complete or absent: a path and what to write enter, a finished file leaves."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL_SUFFIX = ".partial"
CHUNK_BYTES = 1 << 20


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success it becomes `path` in one step, on failure it is removed.

    The temporary name carries the process id, so that two processes never write the same one, and
    lies beside the target, since a rename is one step only within a file system.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        yield partial
        flush_to_disk(partial)
        partial.replace(path)
        flush_to_disk(path.parent)
    except OSError as error:
        # A full disk is noticed by a write, which does not know the name of its file.
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Have the kernel write a file's, or a folder's, content to the disk before we go on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, content: str) -> None:
    """Write a text file, complete or not at all."""
    with replacing(path) as partial:
        partial.write_text(content, encoding="utf-8")


def write_bytes(path: Path, content: "bytes | memoryview") -> None:
    """Write a binary file, complete or not at all."""
    with replacing(path) as partial:
        partial.write_bytes(content)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
