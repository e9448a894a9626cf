"""Inspection in a child process: a path or an inspection task enters, an inspection leaves.

The HDF5 library can crash, or loop for ever, on a damaged file, and Python can catch
neither. So the structure of every file is first walked through by a child process; only a file that
has passed is opened here. One child serves a whole process, so that it costs its start once. The
two talk in lines of JSON.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from alphastomics.errors import InputError
from alphastomics.io.files import require_text_name
from alphastomics.preprocessing.cell_source import CellSource, SourceOptions
from alphastomics.preprocessing.formats.registry import files_of, opened_source
from alphastomics.preprocessing.inspection import Inspection, InspectionTask, inspect_file, size_of
from alphastomics.preprocessing.self_contained import require_sound

PATIENCE_SECONDS = 30.0
BYTES_PER_SECOND = 5e6  # slower than any disk that one would preprocess from
CHILD = (
    "import sys; sys.path[:] = {path!r}; "
    "from alphastomics.preprocessing import subprocess_reader; subprocess_reader.serve()"
)


class SubprocessReader:
    """The child process, started when it is first needed."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def ask(self, act: str, path: Path, num_bytes: int, task: dict[str, Any]) -> Any:
        """Have the child do something with a file; a crash or a standstill is the file's fault."""
        with self._lock:
            child = self._started()
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{json.dumps([act, task])}\n".encode())
            child.stdin.flush()
            patience = PATIENCE_SECONDS + num_bytes / BYTES_PER_SECOND
            ready, _, _ = select.select([child.stdout], [], [], patience)
            line = child.stdout.readline() if ready else b""
            if not line.endswith(b"\n"):
                self.close()
                said = "crash" if ready else "hang"
                raise InputError(
                    f"{path}: its HDF5 structure makes the HDF5 library {said}: the file is "
                    "damaged; copy it again from its source"
                )
        kind, answer = json.loads(line)
        if kind == "refused":
            raise InputError(answer)
        if kind == "system":
            raise OSError(*answer)
        if kind == "fault":
            raise RuntimeError(answer)
        return answer

    @property
    def pid(self) -> int | None:
        """Return the child's process id, or None where there is none."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            code = CHILD.format(path=sys.path)
            pipe = subprocess.PIPE
            self._child = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)
        return self._child


def serve() -> None:
    """Answer until the parent is gone: the child's whole life."""
    # Ctrl-C goes to the parent too, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print must not get between the answers.
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    for line in sys.stdin.buffer:
        act, task = json.loads(line)
        try:
            answers.write(f"{json.dumps(answer_to(act, task))}\n".encode())
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # the parent was killed: nobody is left to hear a word


def answer_to(act: str, task: dict[str, Any]) -> tuple[str, Any]:
    """Do what was asked for; say how it went, and the result or the words of the error."""
    path = Path(task.pop("path"))
    try:
        options = SourceOptions(**task.pop("options"))
        for file in files_of(path, options):
            require_sound(file, walked=act == "walk")
        if act == "walk":
            return "done", None
        with opened_source(path, options) as source:
            inspection = inspect_file(InspectionTask(path=path, options=options, **task), source)
    except InputError as error:
        return "refused", str(error)
    except OSError as error:
        return "system", [error.errno, error.strerror, error.filename and str(error.filename)]
    except Exception as error:  # noqa: BLE001 (it is raised again, by the parent)
        return "fault", f"{type(error).__name__}: {error}"
    plain = {
        **vars(inspection),
        "path": str(path),
        "chunk_counts": inspection.chunk_counts.tolist(),
        "options": asdict(inspection.options),
    }
    return "done", plain


READER = SubprocessReader()
atexit.register(READER.close)


def inspected_in_subprocess(task: InspectionTask) -> Inspection:
    """Inspect a file in this process's child."""
    asked = {**asdict(task), "path": str(task.path)}
    answer = READER.ask("inspect", task.path, task.bytes, asked)
    counts = np.array(answer["chunk_counts"], dtype=np.int64)
    kept = {"path": task.path, "chunk_counts": counts, "options": task.options}
    return Inspection(**{**answer, **kept})


@contextmanager
def in_subprocess(path: Path, options: SourceOptions) -> Iterator[CellSource]:
    """Open an input, after the child has walked through its files."""
    require_text_name(Path(path.name))
    if path.exists():
        asked = {"path": str(path.resolve()), "options": asdict(options)}
        READER.ask("walk", path, size_of(options, path), asked)
    with opened_source(path, options) as source:
        yield source
