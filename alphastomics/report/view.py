"""A Vitessce view beside a page: the page and the store of its cells enter; a JSON file leaves.

A view shows what lies in a store. Its addresses begin at the folder that holds both.
"""

import logging
import os
from pathlib import Path

from alphastomics.config import PreprocessingConfig
from alphastomics.generation.output import POSITION_KEY, VIEW_COLUMNS
from alphastomics.io.spatialdata import STORE_SUFFIX
from alphastomics.io.vitessce import SERVER, view_configuration, view_path, write_configuration
from alphastomics.preprocessing.cell_source import SourceOptions, usual_position_key
from alphastomics.preprocessing.subprocess_reader import in_subprocess

logger = logging.getLogger(__name__)


def is_store(source: Path) -> bool:
    """Tell a store of cells, which a view can show, from files and processed folders."""
    return source.suffix == STORE_SUFFIX and source.is_dir()


def write_view_beside(page: Path, store: Path, options: PreprocessingConfig) -> None:
    """Write the view of the cells of a page: predicted positions where the store has them."""
    folder = Path(os.path.commonpath([page.parent.resolve(), store.parent.resolve()]))
    if folder == Path(folder.anchor):
        logger.warning(
            "%s: no view for Vitessce is written, since the page lies under another root: give an "
            "--output beside the store",
            store,
        )
        return
    with in_subprocess(store, SourceOptions.of(options)) as source:
        address = source.path.resolve().relative_to(folder).as_posix()
        keys = source.position_keys
        key = POSITION_KEY if POSITION_KEY in keys else usual_position_key(keys, options)
        named = dict.fromkeys([options.cell_type_key, *VIEW_COLUMNS])
        columns = [name for name in named if name in source.obs.columns]
    target = view_path(page)
    write_configuration(target, view_configuration(store.name, address, key, columns))
    logger.info(
        "view: %s: run `npx http-server %s -a localhost --cors -p 8000` and open "
        "https://vitessce.io/#?url=%s/%s",
        *(target, folder, SERVER, target.resolve().relative_to(folder).as_posix()),
    )
