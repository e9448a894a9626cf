"""A file holds its own content: an open AnnData file enters; one that reads others is refused.

HDF5 can keep a dataset's bytes in any file of the machine (external storage, virtual datasets,
external links), and a chunk of a Zarr store can be a symbolic link. What such a file names would
become part of the output, and be shared with it.
"""

import os
import stat
from pathlib import Path
from typing import Any

from alphastomics.errors import InputError
from alphastomics.preprocessing.anndata_file import opened, reading, walk

CONTAINERS = (".h5ad", ".h5", ".zarr")


def require_sound(path: Path, *, walked: bool) -> None:
    """Refuse an HDF5 file or a Zarr store that takes content from elsewhere; touch all of it.

    What makes the library crash or hang does so here, in a process that may end. Other files, such
    as tables, are read by libraries that refuse what is damaged.
    """
    if path.suffix.lower() in CONTAINERS or path.is_dir():
        with opened(path) as root:
            require_self_contained(path, root)
            if walked:
                walk(path, root)


def require_self_contained(path: Path, root: Any) -> None:
    """Refuse a file or store that takes any of its content from elsewhere."""
    if path.is_dir():
        _require_plain_files(path)
        return
    with reading(path, "the HDF5 structure"):
        _require_own_datasets(path, root, "", set())


def _require_own_datasets(path: Path, group: Any, where: str, seen: set[int]) -> None:
    """Walk along hard links; a soft link leads to another name in the same file."""
    import h5py

    for name in group:
        entry = f"{where}{name}"
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.SoftLink):
            continue
        if not isinstance(link, h5py.HardLink):
            raise _refusal(path, entry, "a link into another file")
        element = group[name]
        address = int(h5py.h5o.get_info(element.id).addr)
        if address in seen:
            continue
        seen.add(address)
        if isinstance(element, h5py.Group):
            _require_own_datasets(path, element, f"{entry}/", seen)
        elif isinstance(element, h5py.Dataset):
            if element.is_virtual:
                raise _refusal(path, entry, "a virtual dataset, which shows other files")
            if element.id.get_create_plist().get_external_count():
                raise _refusal(path, entry, "stored in another file")


def _require_plain_files(store: Path) -> None:
    """Refuse links and pipes in a Zarr store."""
    for folder, names, files in os.walk(store):
        for name in (*names, *files):
            entry = Path(folder) / name
            mode = entry.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                said = "a symbolic link" if stat.S_ISLNK(mode) else "no plain file"
                raise _refusal(store, entry.relative_to(store).as_posix(), said)


def _refusal(path: Path, entry: str, said: str) -> InputError:
    return InputError(
        f"{path}: {entry} is {said}: content from elsewhere would become part of the output; save "
        "a copy that holds it itself (anndata.read_h5ad, then write_h5ad)"
    )
