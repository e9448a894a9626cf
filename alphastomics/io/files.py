"""Files that are complete or absent: a path and what to write enter, a finished file leaves."""

import errno
import hashlib
import io
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alphastomics.errors import InputError

PARTIAL_SUFFIX = ".partial"
PARTIAL_NAME = re.compile(rf"\..+\.[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}", re.ASCII | re.DOTALL)
CHUNK_BYTES = 1 << 20


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success it becomes `path` in one step, on failure it is removed.

    The temporary name is random and the file is created exclusively, so that nobody else can have
    put a file or a symbolic link there. It lies beside the target, since a rename is one step only
    within a file system.
    """
    partial = partial_of(path)
    try:
        create_exclusively(partial)
        yield partial
        flush_to_disk(partial)
        partial.replace(path)
        flush_to_disk(path.parent)
    except (OSError, RuntimeError, ValueError) as error:
        # A full disk is noticed by a write, which does not know the name of its file; libraries
        # have words of their own for it.
        if getattr(error, "errno", None) is None and is_full(path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path)) from error
        if isinstance(error, OSError) and error.filename is None:
            error.filename = os.fspath(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder; on success it becomes `path`, on failure it is removed."""
    partial, old = partial_of(path), partial_of(path)
    partial.mkdir()
    try:
        yield partial
        for entry in partial.rglob("*"):
            flush_to_disk(entry)
        if path.exists():
            path.replace(old)
        partial.replace(path)
        flush_to_disk(path.parent)
    except OSError as error:
        if error.errno is None and is_full(path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path)) from error
        raise
    finally:
        if old.exists() and not path.exists():
            old.replace(path)
        for folder in (partial, old):
            shutil.rmtree(folder, ignore_errors=True)


class HashedFile(io.BufferedWriter):
    """A file that is written from its first byte to its last, and knows its sha256."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._digest = hashlib.sha256()

    def write(self, content: Any) -> int:
        """Write bytes behind those that are there."""
        self._digest.update(content)
        return super().write(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Refuse to go back: what was written is hashed."""
        raise io.UnsupportedOperation("seek")

    @property
    def sha256(self) -> str:
        """Return the sha256 of what has been written."""
        return self._digest.hexdigest()


@contextmanager
def hashing(path: Path) -> Iterator[HashedFile]:
    """Open a file that becomes `path` once it is complete, and is hashed while it is written."""
    with replacing(path) as partial, HashedFile(partial) as file:
        yield file


def partial_of(path: Path) -> Path:
    """Return a new temporary name beside a file."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")


def is_partial(path: Path) -> bool:
    """Tell a temporary name of ours from a hidden file of somebody else's."""
    return PARTIAL_NAME.fullmatch(path.name) is not None


def create_exclusively(path: Path) -> None:
    """Create an empty file; a name that exists, be it a link to nowhere, is an error."""
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY
    os.close(os.open(path, flags, 0o666))


def is_full(folder: Path) -> bool:
    """Tell whether a disk has next to nothing left."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize < CHUNK_BYTES


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written where it is to be, before any work is done."""
    probe = partial_of(path)
    try:
        create_exclusively(probe)
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    probe.unlink()


def require_output(path: Path, *, overwrite: bool) -> None:
    """Refuse an output that cannot be written, or is there already, before any work is done."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file in it with --output")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it first")
    if path.exists() and not overwrite:
        raise InputError(
            f"{path}: exists already; add --overwrite to replace it, or choose another --output"
        )
    require_writable(path)


def require_space(folder: Path, num_bytes: int) -> None:
    """Refuse to begin what the disk has no space for: half-way, some libraries fail badly.

    HDF5 takes the process down when a file's own tables no longer fit: a chunk is left for them.
    """
    if shutil.disk_usage(folder).free < num_bytes + CHUNK_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(folder))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder to one process: a second one that would write there is refused at once.

    The lock is on the open folder itself, so that it leaves no file, and ends with its process,
    however that ends. File systems without such locks go without.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise InputError(
                    f"{folder}: another process is writing there: wait for it, or name another "
                    "output folder"
                ) from error
        yield
    finally:
        os.close(descriptor)


@contextmanager
def output_folder(path: Path) -> Iterator[None]:
    """Create an output folder for this process alone; one that stays empty is taken away again."""
    require_text_name(path.resolve())  # Arrow opens no other
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_folder(path)
    try:
        with locked(path):
            yield
    except Exception:
        for folder in created:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def make_folder(path: Path) -> None:
    """Create a folder; what is in the way of it is the caller's mistake."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{path}: a file is in the way of this output folder") from error
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"{path}: cannot be created ({why}); choose another folder") from error


def require_file(path: Path) -> None:
    """Refuse what cannot be read to its end: a folder, a pipe, a device; and what is not there."""
    if path.is_file():
        return
    if not path.exists():
        raise InputError(f"{path}: no such file")
    said = "a folder" if path.is_dir() else "a pipe or a device"
    raise InputError(f"{path}: is {said}, where a plain file is expected")


def require_text_name(path: Path) -> None:
    """Refuse a name that is no text: it would have to go into files that are."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{path}: its name is not UTF-8 text: rename it") from error


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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
