"""A view of a store: its table's name and columns enter; a Vitessce view configuration leaves.

Vitessce (https://vitessce.io) shows cells at their positions in a browser, coloured by gene or by
set. Its data come from a web server: the addresses are those of one on this machine, in the folder
of the store.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from alphastomics.io.files import write_text
from alphastomics.io.spatialdata import STORE_SUFFIX, TABLE

SCHEMA_VERSION = "1.0.16"
SERVER = "http://localhost:8000"
VIEW = "Positions"


def view_path(store: Path) -> Path:
    """Name the view after its store; that of a page keeps the page's ending, to tell them apart."""
    if store.suffix == STORE_SUFFIX:
        return store.with_suffix(".vitessce.json")
    return store.with_name(f"{store.name}.vitessce.json")


def write_view(store: Path, position_key: str, columns: Sequence[str]) -> None:
    """Write the view of a store beside it.

    Parameters
    ----------
    store
        The SpatialData store.
    position_key
        Key of obsm with the positions to show.
    columns
        Columns of obs that group cells.
    """
    address = f"{store.name}/tables/{TABLE}"
    write_configuration(
        view_path(store), view_configuration(store.name, address, position_key, columns)
    )


def write_configuration(path: Path, config: dict[str, Any]) -> None:
    """Write a view."""
    write_text(path, json.dumps(config, indent=2) + "\n")


def view_configuration(
    name: str, address: str, position_key: str, columns: Sequence[str]
) -> dict[str, Any]:
    """Return positions large at the left; genes and sets of cells at the right.

    `address` is the way from the folder that is served to the AnnData in Zarr.
    """
    options: dict[str, Any] = {
        "obsEmbedding": [{"path": f"obsm/{position_key}", "dims": [0, 1], "embeddingType": VIEW}],
        "obsFeatureMatrix": {"path": "X"},
    }
    if columns:
        options["obsSets"] = [{"name": column, "path": f"obs/{column}"} for column in columns]
    file = {
        "fileType": "anndata.zarr",
        "url": f"{SERVER}/{quote(address)}",
        "options": options,
        "coordinationValues": {"obsType": "cell", "featureType": "gene"},
    }
    views = [("scatterplot", (0, 0, 8, 12)), ("featureList", (8, 0, 4, 6))]
    views += [("obsSets", (8, 6, 4, 6))] if columns else []
    layout = []
    for component, area in views:
        scopes = {"dataset": "A"} | ({"embeddingType": "A"} if component == "scatterplot" else {})
        layout.append(
            {"component": component, "coordinationScopes": scopes}
            | dict(zip("xywh", area, strict=True))
        )
    return {
        "version": SCHEMA_VERSION,
        "name": name,
        "description": "",
        "datasets": [{"uid": "A", "name": name, "files": [file]}],
        "coordinationSpace": {"dataset": {"A": "A"}, "embeddingType": {"A": VIEW}},
        "layout": layout,
        "initStrategy": "auto",
    }
