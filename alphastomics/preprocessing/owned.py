"""Which files of an output folder are ours: a folder enters, the names its records list leave.

`--overwrite` removes what these functions return and nothing else, and only when what replaces it
is complete. A file that no record lists belongs to the user, whatever its name.
"""

import re
from pathlib import Path
from typing import Any, TypeGuard

from alphastomics.errors import InputError
from alphastomics.preprocessing import resume
from alphastomics.preprocessing.schema import (
    ALL_SPLITS,
    DATA_FOLDER,
    DATASET_FILE,
    METADATA_FILE,
    REFERENCE,
    SCALING_FILE,
    SHARD_FILE,
    SPLITS,
    STATISTICS_FILE,
)

PART_FILE = re.compile(r"part-\d{5,}-\d{5,}\.arrow", re.ASCII)
WRITTEN_SHARD = re.compile(rf"({'|'.join(ALL_SPLITS)})(-\d{{5,}})?\.parquet", re.ASCII)
# Words that a damaged record of ours still has, and other programs' files have not.
RECORD_WORDS = {DATASET_FILE: ('"panels"', '"parts"'), METADATA_FILE: ("row_groups", "sha256")}


def dataset_files(folder: Path) -> list[str] | None:
    """List the files that stage 1 wrote into a folder; None where none of its records is there."""
    path = folder / DATASET_FILE
    if not path.is_file():
        return None
    listed = _names(resume.load(path), "parts")
    if listed is None:
        if not _was_ours(path):
            return None
        listed = [name.name for name in folder.glob("part-*.arrow")]
    return [*filter(PART_FILE.fullmatch, listed), STATISTICS_FILE, DATASET_FILE]


def processed_files(folder: Path) -> list[str] | None:
    """List the files that stage 2 wrote into a folder; None where there is no metadata.json."""
    path = folder / METADATA_FILE
    if not path.is_file():
        return None
    document = resume.load(path)
    listed = [_names(document, "splits", split, "shards") for split in SPLITS]
    listed.append(_names(document, "splits", REFERENCE, "shards") or [])
    if None in listed:
        if not _was_ours(path):
            return None
        inside = (folder / DATA_FOLDER).glob("*.parquet")
        named = [name.name for name in inside if WRITTEN_SHARD.fullmatch(name.name)]
        listed = [[f"{DATA_FOLDER}/{name}" for name in named]]
    shards = [name for names in listed for name in names or ()]
    return [*filter(SHARD_FILE.fullmatch, shards), SCALING_FILE, METADATA_FILE]


def _names(document: Any, *keys: str) -> list[str] | None:
    """Read the names of files that a record lists under some keys; None where it lists none."""
    for key in keys:
        if not isinstance(document, dict) or key not in document:
            return None
        document = document[key]
    if not isinstance(document, list):
        return None
    names = [record.get("file") for record in document if isinstance(record, dict)]
    return [name for name in names if isinstance(name, str)]


def _was_ours(path: Path) -> bool:
    """Tell a damaged record of ours from another program's file of that name."""
    text = path.read_bytes().decode(errors="replace")
    return all(word in text for word in RECORD_WORDS[path.name])


def is_own_name(name: Any) -> TypeGuard[str]:
    """Tell a name that this program gives to a file of a dataset from any other, or a path."""
    return isinstance(name, str) and (
        name in (STATISTICS_FILE, DATASET_FILE, SCALING_FILE, METADATA_FILE)
        or PART_FILE.fullmatch(name) is not None
        or SHARD_FILE.fullmatch(name) is not None
    )


def require_not_read(output: Path, *inputs: Path | None) -> None:
    """Refuse an output that is one of the inputs: --overwrite replaces results alone."""
    for path in inputs:
        if path is None or not output.exists():
            continue
        resolved = output.resolve()
        inside = path.is_dir() and resolved.is_relative_to(path.resolve())
        name = resolved.relative_to(path.resolve()).as_posix() if inside else None
        if is_own_name(name) or (path.is_file() and output.samefile(path)):
            raise InputError(
                f"{output}: is read by this command, and is not replaced by --overwrite either: "
                "name another --output"
            )


def not_ours(path: Path) -> InputError:
    """Say that a file in the output folder is not ours to remove, with or without --overwrite."""
    return InputError(
        f"{path}: was not written by this command, and is not removed by --overwrite either: "
        "choose another --output_dir, or move it away"
    )
