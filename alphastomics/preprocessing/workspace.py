"""The work of a stage in its output folder: begun with a request, moved into place when complete.

What was there before stays until what replaces it is complete, and only files that a record of ours
lists are ever removed. A run that was stopped is continued by the same command.
"""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphastomics.errors import InputError
from alphastomics.io.files import PARTIAL_SUFFIX, is_partial, make_folder
from alphastomics.preprocessing.owned import is_own_name, not_ours
from alphastomics.preprocessing.resume import (
    REQUEST_FILE,
    is_file_of,
    load_marker,
    require_same_request,
    write_marker,
)

REPLACED_FILE = "replaced.json"


@dataclass(frozen=True)
class Workspace:
    """An output folder, and the folders in it that only the work needs.

    Parameters
    ----------
    output
        Where the result goes.
    record
        The file that vouches for the result, by its name in `output`.
    work
        Folder of the request and of completion markers.
    staged
        Where complete files wait.
    markers
        Pattern of the completion markers of those files.
    listed
        Lists the files of ours in `output`, None where it has no record.
    """

    output: Path
    record: str
    work: Path
    staged: Path
    markers: str
    listed: Callable[[Path], list[str] | None]

    @property
    def begun(self) -> dict[str, Any] | None:
        """Return what an unfinished run was asked for; None where there is none."""
        return load_marker(self.work / REQUEST_FILE)

    def require_outside(self, inputs: Iterable[Path]) -> None:
        """Refuse inputs in a folder that is cleared when the work is done."""
        for path in inputs:
            for folder in (self.work, self.staged):
                if path.resolve().is_relative_to(folder.resolve()):
                    raise InputError(
                        f"{path}: lies in {folder}, which is cleared when the work is done: move "
                        "it elsewhere first, or choose another --output_dir"
                    )

    def require_ours(self, foreign: Iterable[Path | None]) -> None:
        """Refuse a folder without a record of ours in which one of these files is."""
        if self.begun is None and self.listed(self.output) is None:
            for path in foreign:
                if path is not None and path.exists():
                    raise not_ours(path)

    def require_same_request(self, request: dict[str, Any]) -> None:
        """Refuse to go on with an unfinished run that was asked for something else."""
        if self.begun is not None:
            require_same_request(self.begun, request, self.output)

    @contextmanager
    def working(self, request: dict[str, Any], empty: Sequence[Path]) -> Iterator[None]:
        """Begin, or go on; where the input turns out to be bad, nothing half-written is left.

        Work that was stopped for another reason stays, since the same command will go on with it.
        The folders `empty` go too, if nothing is left in them.
        """
        old = [*(self.listed(self.output) or ()), *self.replaced(), *self.moved_in()]
        if self.begun != request:
            self.clear()
        for folder in (self.work, self.staged):
            make_folder(folder)
        for folder in {self.output, self.staged.parent, self.work, self.staged}:
            remove_partial_files(folder)
        try:
            write_marker(self.work / REQUEST_FILE, request)
            # A killed run looks up which old files go when the new ones are complete.
            write_marker(self.work / REPLACED_FILE, {"files": sorted(set(old))})
            yield
        except InputError:
            self.clear()
            for folder in empty:
                if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
                    folder.rmdir()
            raise

    def replaced(self) -> list[str]:
        """Return the old files that were to go: names that this program gives, and no others."""
        names = (load_marker(self.work / REPLACED_FILE) or {}).get("files")
        return [name for name in names if is_own_name(name)] if isinstance(names, list) else []

    def moved_in(self) -> list[str]:
        """List files that a killed run had already moved to the output, by its markers."""
        moved = []
        for path in sorted(self.work.glob(self.markers)):
            marker = load_marker(path) or {}
            name = marker.get("file")
            if is_own_name(name) and is_file_of(self.output / name, marker.get("sha256")):
                moved.append(name)
        return moved

    def move_into_place(self, names: Iterable[str]) -> None:
        """Replace old files by new ones, by their names in the output.

        The record goes first, so that no mixture is taken for whole; the caller writes the new one.
        A file that is not there any more was moved before.
        """
        (self.output / self.record).unlink(missing_ok=True)
        new = [self.output / name for name in names]
        for path in new:
            staged = self.staged / path.name
            if staged.is_file():
                staged.replace(path)
        for path in {self.output / name for name in self.replaced()} - set(new):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what only the work itself needed; only this program writes into it."""
        for folder in (self.work, self.staged):
            if folder.is_symlink():
                folder.unlink()
            elif folder.is_dir():
                shutil.rmtree(folder)


def first_file(folder: Path, ignored: Collection[str] = ()) -> Path | None:
    """Return the first thing in a folder that no killed run left under a temporary name."""
    if not folder.is_dir():
        return None
    paths = [path for path in folder.iterdir() if not is_partial(path)]
    return min((path for path in paths if path.name not in ignored), default=None)


def remove_partial_files(folder: Path) -> None:
    """Remove what a killed run left under its temporary names; other names are not ours."""
    for path in folder.glob(f".*{PARTIAL_SUFFIX}"):
        if is_partial(path):
            path.unlink(missing_ok=True)
