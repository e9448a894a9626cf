"""Settings of the notebook: a file, a dict or a `Config`, and keywords enter; a `Config` leaves.

A keyword is the last part of a key of config.yaml, where only one key ends like that, or a flag of
`alphastomics train` that takes a value: `d_model`, `batch_size`, `num_steps`, `lr`, `seed`, ….
"""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from alphastomics.api.setup import Setup
from alphastomics.cli.flags import COMMANDS
from alphastomics.config import Config
from alphastomics.config.file import (
    SECOND_NAMES,
    document_fields,
    parse_document,
    put,
    read_document,
    to_document,
)
from alphastomics.config.message import closest
from alphastomics.errors import InputError

Settings = Config | Mapping[str, Any] | str | Path | None
# A model keeps its data and its run in its own folder.
POSITION_KEYS = ("data.processed_data_dir", "logging.save_dir")


def updated(settings: Settings, keywords: Mapping[str, Any]) -> Config:
    """Overlay settings with keywords and check the whole."""
    document = document_of(settings)
    # The settings by themselves first: a keyword must not hide a mistake in them.
    parse_document(document, "settings")
    known = keyword_paths()
    origins = {}
    for name, value in keywords.items():
        path = known.get(name)
        if path is None:
            raise InputError(f"{name}: unknown keyword; {advice(name, list(known))}")
        put(document, path, value)
        origins[path] = name
    return parse_document(document, "settings", origins)


def document_of(settings: Settings) -> dict[str, Any]:
    """Return settings as the nested dict of config.yaml."""
    if settings is None:
        return {}
    if isinstance(settings, Config):
        return to_document(settings, only_set=True)
    if isinstance(settings, str | Path):
        return read_document(Path(settings))
    return copy.deepcopy(dict(settings))


def with_data_dir(config: Config, data_dir: str | Path) -> Config:
    """Name the processed folder of the training, and leave open what was not set."""
    document = to_document(config, only_set=True)
    put(document, POSITION_KEYS[0], str(data_dir))
    return parse_document(document, "settings")


def keyword_paths() -> dict[str, str]:
    """Return what a keyword may be called, and the key that it sets."""
    # A notebook's slices are real ones: it sets nothing of the synthetic tissue.
    paths = [
        path
        for path in document_fields()
        if path not in (*SECOND_NAMES, *POSITION_KEYS) and not path.startswith("simulation.")
    ]
    times = Counter(path.rpartition(".")[2] for path in paths)
    keys = {path.rpartition(".")[2]: path for path in paths}
    flags = {
        flag.name: flag.path
        for flag in COMMANDS["train"].flags
        if flag.path is not None and flag.path not in POSITION_KEYS and not flag.is_switch
    }
    return {name: path for name, path in keys.items() if times[name] == 1} | flags


def advice(name: str, known: list[str]) -> str:
    """Say what a keyword may have meant."""
    candidates = [path for path in document_fields() if path.rpartition(".")[2] == name]
    if len(candidates) > 1:
        return (
            f"several settings end like that: give settings={{...}} with {' or '.join(candidates)}"
        )
    if name == "data_dir" or (candidates and candidates[0] in POSITION_KEYS):
        return (
            "data and run of a model are in its folder: give folder=..., or name the processed "
            "folder of a model that you load with AlphaSTomics.load(folder, data_dir=...)"
        )
    if name in {field.name for field in fields(Setup)}:
        return f"say it of each AnnData: AlphaSTomics.setup_anndata(adata, {name}=…)"
    meant = closest(name, known)
    return f"did you mean {meant}?" if meant else "`alphastomics config` prints all settings"
