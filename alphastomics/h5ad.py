"""Writing AnnData: an object enters, a whole .h5ad file leaves, or none.

The file is made in memory and then written as bytes: on a full disk HDF5 itself leaves a broken
file open, and takes the whole process down with it when that is closed.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from alphastomics.files import write_bytes

if TYPE_CHECKING:
    from anndata import AnnData


def write_h5ad(path: Path, data: "AnnData", compression: str | None) -> None:
    """Write an AnnData object, complete or not at all."""
    import h5py
    from anndata.io import write_elem

    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        write_elem(file, "/", data, dataset_kwargs={"compression": compression})
    write_bytes(path, buffer.getbuffer())
