"""What was asked before: a folder and a request enter; go on, stop, or start again leaves.

A *request* is a plain dictionary of all that the resulting bytes depend on. A *marker* is a small
JSON file that says a task is done, written after the task's own files. Both carry the sha256 of
their own content, and completion markers that of the files they vouch for.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alphastomics.errors import InputError
from alphastomics.io.files import sha256_of, write_text

REQUEST_FILE = "request.json"
CHECKSUM_KEY = "record_sha256"
SHOWN = 3


def dump(value: object) -> str:
    """Write plain data as JSON, with the same bytes every time."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def load(path: Path) -> Any:
    """Read plain data; None where there is none, or something else."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def checksum_of(record: dict[str, Any]) -> str:
    """Return the sha256 of a record, its own checksum apart, whatever its layout in the file."""
    content = {key: value for key, value in record.items() if key != CHECKSUM_KEY}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record that carries the sha256 of its content."""
    return {**record, CHECKSUM_KEY: checksum_of(record)}


def checksum_holds(record: Any) -> bool:
    """Tell whether a record is as it was written."""
    return isinstance(record, dict) and record.get(CHECKSUM_KEY) == checksum_of(record)


def unaltered(record: dict[str, Any]) -> bool:
    """Tell whether a record is as it was written; one of version 0.1.0 has no checksum."""
    return CHECKSUM_KEY not in record or checksum_holds(record)


def load_marker(path: Path) -> dict[str, Any] | None:
    """Read a completion marker or a request; None where there is none, or one that was altered."""
    record = load(path)
    if not checksum_holds(record):
        return None
    return {key: value for key, value in record.items() if key != CHECKSUM_KEY}


def is_file_of(path: Path, digest: Any) -> bool:
    """Tell whether a file is there and has this sha256."""
    return path.is_file() and sha256_of(path) == digest


def are_files_of(folder: Path, checksums: Mapping[str, str]) -> bool:
    """Tell whether all files of a folder that a record lists are as they were written."""
    return all(is_file_of(folder / name, digest) for name, digest in checksums.items())


def load_done(done: Path, files: Mapping[str, Sequence[Path]]) -> dict[str, Any] | None:
    """Read a task's completion marker; None where the task is not done, or a file is not as it was.

    Parameters
    ----------
    done
        The marker.
    files
        The key of each file's sha256 in the marker -> where the file may be.
    """
    marker = load_marker(done)
    if marker is not None:
        for key, paths in files.items():
            if not any(is_file_of(path, marker[key]) for path in paths):
                return None
    return marker


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
    changes = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key):
            continue
        if key.startswith("inputs."):
            name = key.removeprefix("inputs.")
            state = "is gone" if key not in new else "is new" if key not in old else "has changed"
            changes.append(f"{name} {state}")
        else:
            changes.append(f"{key} was {old.get(key)!r} and is now {new.get(key)!r}")
    return changes


def require_same_request(before: Any, now: dict[str, Any], folder: Path) -> None:
    """Refuse to go on in a folder that was begun with other inputs or settings."""
    changes = differences(before, now)
    if changes:
        more = f" (and {len(changes) - SHOWN} more)" if len(changes) > SHOWN else ""
        raise InputError(
            f"{folder}: was begun with other inputs or settings: {'; '.join(changes[:SHOWN])}{more}"
            ". Give --overwrite to start again, or another --output_dir"
        )


def write_marker(path: Path, value: dict[str, Any]) -> None:
    """Say that a task is done."""
    write_text(path, dump(with_checksum(value)))
