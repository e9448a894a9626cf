"""A first look at a file from a safe distance: a survey's task enters, a survey or one line leaves.

The HDF5 library can crash, or turn in circles for ever, on a damaged file, and Python can catch
neither. So the structure of every file is first walked through by a child process; only a file that
has passed is opened here. One child serves a whole process, so that it costs its start once.
"""

import atexit
import pickle
import select
import subprocess
import sys
from threading import Lock
from typing import BinaryIO

from alphastomics.errors import InputError
from alphastomics.preprocessing.survey import Survey, SurveyTask, survey_file

PATIENCE_SECONDS = 30.0
BYTES_PER_SECOND = 5e6  # slower than any disk that one would preprocess from
CHILD = (
    "import sys; sys.path[:] = {path!r}; "
    "from alphastomics.preprocessing import guard; guard.serve()"
)


class Guard:
    """The child process, started when it is first needed."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def survey(self, task: SurveyTask) -> Survey:
        """Have a file surveyed; a crash or a standstill is the file's fault."""
        with self._lock:
            child = self._started()
            assert child.stdin is not None
            assert child.stdout is not None
            pickle.dump(task, child.stdin)
            child.stdin.flush()
            patience = PATIENCE_SECONDS + task.bytes / BYTES_PER_SECOND
            ready, _, _ = select.select([child.stdout], [], [], patience)
            try:
                answer = pickle.load(child.stdout) if ready else None
            except EOFError:
                answer = None
            if answer is None:
                self.close()
                said = "crash" if ready else "hang"
                raise InputError(
                    f"{task.path}: its HDF5 structure makes the HDF5 library {said}: the file is "
                    "damaged; copy it again from its source"
                )
        if isinstance(answer, Exception):
            raise answer
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
    """Answer surveys until the parent is gone: the child's whole life."""
    # What libraries print must not get between the answers.
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    requests: BinaryIO = sys.stdin.buffer
    while True:
        try:
            task = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Survey | Exception = survey_file(task)
        except Exception as error:  # noqa: BLE001 (it is raised again, by the parent)
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


GUARD = Guard()
atexit.register(GUARD.close)


def guarded_survey(task: SurveyTask) -> Survey:
    """Survey a file in this process's child."""
    return GUARD.survey(task)
