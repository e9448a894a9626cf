"""Writing AnnData: an object enters, a whole .h5ad file leaves, or none.

The file is made in memory and then written as bytes: on a full disk HDF5 itself leaves a broken
file open, and takes the whole process down with it when that is closed.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from alphastomics.io.files import write_bytes

if TYPE_CHECKING:
    from anndata import AnnData


def write_anndata(path: Path, data: "AnnData", compression: str | None) -> None:
    """Write an AnnData object, complete or not at all."""
    import h5py
    from anndata.io import write_elem

    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file, nullable_strings():
        write_elem(file, "/", data, dataset_kwargs={"compression": compression})
    write_bytes(path, buffer.getbuffer())


def write_scratch(value: object) -> None:
    """Write something to memory, and forget it: what cannot be written shows."""
    import h5py
    from anndata.io import write_elem

    with h5py.File(io.BytesIO(), "w") as scratch, nullable_strings():
        write_elem(scratch, "value", value)


@contextmanager
def nullable_strings() -> Iterator[None]:
    """Have anndata write columns of text in which some is missing, as it reads them."""
    import anndata

    if not hasattr(anndata.settings, "allow_write_nullable_strings"):  # before 0.11
        yield
        return
    with anndata.settings.override(allow_write_nullable_strings=True):
        yield
