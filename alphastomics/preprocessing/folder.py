"""A processed folder, here or on the Hub: its address enters, files and metadata leave."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from alphastomics.errors import InputError, keep_secret, quoted
from alphastomics.io.files import require_text_name, sha256_of
from alphastomics.io.hub import is_hub_id
from alphastomics.preprocessing.schema import METADATA_FILE, Metadata, parse_metadata

SHOWN = 200  # letters of what a remote service said


class DataFolder:
    """Files of a processed folder, by their names in it.

    Parameters
    ----------
    where
        A folder, a Hub dataset (`owner/name` or `hf://datasets/owner/name`), or another address
        that fsspec knows.
    """

    def __init__(self, where: str | Path) -> None:
        self.where = str(where).rstrip("/") or "/"
        self.local: Path | None = None
        self._remote: Any = None
        path = Path(where)
        if "://" in self.where:
            self._open(self.where)
        elif path.is_dir():
            require_text_name(path)
            self.local = path
        elif path.exists():
            raise InputError(f"{where}: is not a folder: name the folder that `preprocess` wrote")
        elif not is_hub_id(self.where):
            raise InputError(
                f"{where}: there is no such folder: run `alphastomics preprocess` with it as "
                "--output_dir first, or name the folder that it wrote with --data_dir"
            )
        else:
            self._open(f"hf://datasets/{self.where}")

    def _open(self, address: str) -> None:
        try:
            import fsspec

            self._remote, self._root = fsspec.core.url_to_fs(address)
            keep_secret(_login(address))
        except (ImportError, ValueError) as error:
            raise InputError(
                f"{self.where}: there is no such folder here, and reading {address} fails "
                f"({quoted(error, SHOWN)}): check the name, or pip install 'alphastomics[hub]'"
            ) from None

    def name_of(self, file: str) -> str:
        """Return the full name of a file, for messages."""
        return f"{self.where}/{file}"

    def metadata(self) -> Metadata:
        """Read metadata.json."""
        try:
            text = self.read_bytes(METADATA_FILE).decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.name_of(METADATA_FILE)}: is not text: it is damaged"
            ) from error
        return parse_metadata(text, self.name_of(METADATA_FILE))

    def read_bytes(self, file: str) -> bytes:
        """Read a whole file."""
        with self._reaching(file):
            if self.local is not None:
                return (self.local / file).read_bytes()
            return bytes(self._remote.cat_file(f"{self._root}/{file}"))

    def open(self, file: str) -> pa.NativeFile:
        """Open a file for reading here and there in it."""
        with self._reaching(file):
            if self.local is not None:
                return pa.OSFile(str(self.local / file))
            return pa.PythonFile(self._remote.open(f"{self._root}/{file}", "rb"), mode="r")

    def size_of(self, file: str) -> int:
        """Return the size of a file in bytes."""
        with self._reaching(file):
            if self.local is not None:
                return (self.local / file).stat().st_size
            return int(self._remote.size(f"{self._root}/{file}"))

    def digest_of(self, file: str) -> str | None:
        """Return the sha256 of a file; None far away, where it would be read for that alone."""
        with self._reaching(file):
            return None if self.local is None else sha256_of(self.local / file)

    @contextmanager
    def _reaching(self, file: str) -> Iterator[None]:
        """Convert what goes wrong on the way to a file into one line."""
        try:
            yield
        except OSError as error:
            # from None: the words of a remote service may quote the token or a signed address.
            raise self._unreadable(file, error) from (None if self.local is None else error)
        except Exception as error:  # every remote file system has errors of its own
            if self.local is not None:
                raise
            status = getattr(getattr(error, "response", None), "status_code", None)
            # A reply's own words may quote a signed address.
            said = quoted(error, SHOWN) if status is None else f"status {status}"
            raise InputError(
                f"{self.where}: there is no such folder here, and {self.name_of(file)} cannot be "
                f"read from afar ({said}): check the name and the network"
            ) from None

    def _unreadable(self, file: str, error: OSError) -> InputError:
        if not isinstance(error, FileNotFoundError):
            status = getattr(getattr(error, "response", None), "status_code", None)
            said = quoted(error.strerror or error, SHOWN) if status is None else f"status {status}"
            return InputError(f"{self.name_of(file)}: cannot be read ({said})")
        if file == METADATA_FILE:
            return InputError(
                f"{self.where}: there is no {METADATA_FILE}: it is not a folder that `preprocess` "
                "finished (nor a Hub dataset of that kind); run `alphastomics preprocess` first"
            )
        return InputError(
            f"{self.name_of(file)}: is missing, though {METADATA_FILE} lists it: copy the whole "
            "folder again, or preprocess again"
        )


def _login(address: str) -> str | None:
    """Return the token that the Hub's file system sends along, so that no message shows it."""
    if not address.startswith("hf://"):
        return None
    from huggingface_hub import get_token

    return get_token()
