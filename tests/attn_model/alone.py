"""Code in a process of its own: the annotations that the tests check are no part of a graph."""

import os
import subprocess
import sys
from pathlib import Path


def run_alone(code: str) -> None:
    """Run Python code beside the tests; fail with what it wrote."""
    # Beside the paths that are set: what the package needs may come from there.
    places = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
