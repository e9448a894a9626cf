"""The program as users run it: processes that can be killed, filled up and set on one another."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def start(*argv: object, cwd: Path, code: str = "") -> subprocess.Popen[str]:
    """Start the program; `code` runs first, in the same process."""
    script = f"import sys\n{code}\nfrom alphastomics.main import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, argv)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; return the status and what was said."""
    _, err = process.communicate(timeout=300)
    return process.returncode, err


def run(*argv: object, cwd: Path, code: str = "") -> tuple[int, str]:
    """Run the program to its end."""
    return ended(start(*argv, cwd=cwd, code=code))


def strike(process: subprocess.Popen[str], number: signal.Signals, after: float) -> tuple[int, str]:
    """Send a signal after some seconds, unless it is over before."""
    deadline = time.monotonic() + after
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if process.poll() is None:
        process.send_signal(number)
    return ended(process)


def digests(folder: Path, *patterns: str) -> dict[str, str]:
    """Return the sha256 of the files that make a result."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for pattern in patterns
        for path in folder.glob(pattern)
        if path.is_file()
    }


# Unfinished work that the same command goes on with.
WORK_FOLDERS = {".stage1-work", ".staged", ".replaced"}


def leftovers(folder: Path) -> list[str]:
    """List what no command leaves behind."""
    return [
        path.name
        for path in folder.rglob("*")
        if path.name.endswith(".partial")
        or (path.name.startswith(".") and path.name not in WORK_FOLDERS)
    ]
