"""Writing AnnData: an object enters, a whole .h5ad file leaves, or none.

The file is made in memory and then written as bytes: on a full disk HDF5 itself leaves a broken
file open, and takes the whole process down with it when that is closed.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphastomics.errors import InputError, quoted
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


def require_storable(source: Path, data: "AnnData", remedy: str) -> None:
    """Refuse what anndata reads and cannot write: other programs put such things into a file."""
    import h5py
    from anndata.io import write_elem

    tables = {slot: getattr(data, slot) for slot in ("obs", "var")}
    parts = {f"{slot}[{key!r}]": table[[key]] for slot, table in tables.items() for key in table}
    parts |= {f"{slot}_names": table.iloc[:, :0] for slot, table in tables.items()}
    parts |= {f"uns[{key!r}]": {key: value} for key, value in data.uns.items()}
    for slot in ("obsm", "varm", "obsp", "varp", "layers"):
        # anndata 0.13 counts X among the layers, by the name None.
        held = {key: value for key, value in getattr(data, slot).items() if key is not None}
        few = {key: first_rows(value) for key, value in held.items()}
        parts |= {f"{slot}[{key!r}]": {key: value} for key, value in few.items()}
    for name, value in parts.items():
        try:
            with h5py.File(io.BytesIO(), "w") as scratch, nullable_strings():
                write_elem(scratch, "value", value)
        except Exception as error:  # anndata's own kind has no public name
            raise InputError(
                f"{source}: {name} cannot be written to a copy ({quoted(error, 100)}); {remedy}"
            ) from error


def first_rows(value: Any) -> Any:
    """Return a little of an array or table: whether its kind can be written shows with it."""
    return value.iloc[:2] if hasattr(value, "iloc") else value[:2]


@contextmanager
def nullable_strings() -> Iterator[None]:
    """Have anndata write columns of text in which some is missing, as it reads them."""
    import anndata

    if not hasattr(anndata.settings, "allow_write_nullable_strings"):  # before 0.11
        yield
        return
    with anndata.settings.override(allow_write_nullable_strings=True):
        yield
