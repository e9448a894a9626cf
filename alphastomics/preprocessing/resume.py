"""What was asked before: a folder and a request enter; go on, stop, or start again leaves.

A *request* is a plain dictionary of all that the resulting bytes depend on. A *receipt* is a small
JSON file that says a task is done, written after the task's own files.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alphastomics.errors import InputError
from alphastomics.files import PARTIAL_SUFFIX, write_text

REQUEST_FILE = "request.json"
SHOWN = 3


def dump(value: object) -> str:
    """Write plain data as JSON, with the same bytes every time."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def load(path: Path) -> Any:
    """Read a receipt or a request; None where there is none, or something else."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def flattened(value: Any, name: str) -> Iterator[tuple[str, object]]:
    """Name every leaf of nested plain data."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flattened(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def differences(before: Any, now: Any) -> list[str]:
    """List what differs between two requests, in words."""
    old, new = dict(flattened(before, "")), dict(flattened(now, ""))
    found = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key):
            continue
        if key.startswith("inputs."):
            name = key.removeprefix("inputs.")
            state = "is gone" if key not in new else "is new" if key not in old else "has changed"
            found.append(f"{name} {state}")
        else:
            found.append(f"{key} was {old.get(key)!r} and is now {new.get(key)!r}")
    return found


def require_same(before: Any, now: dict[str, Any], folder: Path) -> None:
    """Refuse to go on in a folder that was begun with other inputs or settings."""
    found = differences(before, now)
    if found:
        more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
        raise InputError(
            f"{folder}: was begun with other inputs or settings: {'; '.join(found[:SHOWN])}{more}. "
            "Give --overwrite to start again, or another --output_dir"
        )


@contextmanager
def undone_on_bad_input(*paths: Path, empty: Path) -> Iterator[None]:
    """Remove the unfinished work when the input turns out to be bad: nothing half-written is left.

    Work that was stopped for another reason stays, since the same command will go on with it. The
    folder `empty` goes too, if nothing is left in it.
    """
    try:
        yield
    except InputError:
        for path in paths:
            remove(path)
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()
        raise


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def holds_files(folder: Path) -> bool:
    """Tell whether a folder holds anything but what a killed run left under temporary names."""
    return folder.exists() and any(
        not path.name.endswith(PARTIAL_SUFFIX) for path in folder.iterdir()
    )


def remove_partial_files(*folders: Path) -> None:
    """Remove what a killed run left under its temporary names."""
    for folder in folders:
        for path in folder.glob(f".*{PARTIAL_SUFFIX}"):
            path.unlink(missing_ok=True)


def write_receipt(path: Path, value: object) -> None:
    """Say that a task is done."""
    write_text(path, dump(value))
