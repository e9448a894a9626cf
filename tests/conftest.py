"""What every test stands on: shape annotations of the package are checked while it runs."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import settings

# Two test processes share two cores: more threads than that only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if os.environ.get("SHAPE_CHECKS", "1") != "0":
    # Off for tests that compile the network: the compiler cannot look into the checks.
    jaxtyping.install_import_hook("alphastomics", "beartype.beartype")

# No deadline: a busy machine must not turn a right answer into a failure.
settings.register_profile("alphastomics", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("alphastomics")

ROOT = Path(__file__).parent.parent
# Calls of a test whose shapes are all checked; of those after it one in `CHECKED_EVERY` is.
CHECKED_FIRST, CHECKED_EVERY = 2000, 20


class SampledChecks:
    """Whether jaxtyping checks a call: a training repeats the same ones ten thousand times."""

    jaxtyping_remove_typechecker_stack = False
    calls = 0

    @property
    def jaxtyping_disable(self) -> bool:
        """Count a call, and say whether it goes unchecked."""
        self.calls += 1
        repeated = self.calls > CHECKED_FIRST and self.calls % CHECKED_EVERY != 0
        return repeated or jaxtyping.config.jaxtyping_disable


# Modules that take longest: begun last, one of them would keep a core busy and the others idle.
LONGEST = (
    "test_reconstruction",
    "test_tutorial",
    "test_resume",
    "test_documented",
    "test_run_folder",
    "test_train",
    "test_showcase",
    "test_blocks",
    "test_distributed",
    "test_browser",
    "test_contract",
    "test_wheel",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the modules that take longest."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


CHECKS = jaxtyping._decorator.config = SampledChecks()


@pytest.fixture(autouse=True)
def checked_calls() -> None:
    """Check the shapes of a test's first calls, then of every twentieth."""
    CHECKS.calls = 0


@pytest.fixture(autouse=True)
def quiet_logging() -> Iterator[None]:
    """Undo what `main()` does to logging, so that no test depends on the one before it."""
    yield
    logging.captureWarnings(capture=False)
    logging.getLogger("alphastomics").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True, scope="session")
def short_position_head() -> Iterator[None]:
    """Fit position heads and count models for moments: most tests do not ask how good they are."""
    if find_spec("torch") is None:  # benchmarks/python_matrix.py: tests of the data alone
        yield
        return
    from alphastomics.config import auto

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "COUNT_UPDATES", {"cpu": 5, "gpu": 5})
        patch.setattr(auto, "HEAD_UPDATES", 5)
        patch.setattr(auto, "LEAST_HEAD_UPDATES", 5)
        yield


@pytest.fixture(scope="module")
def whole_position_head() -> Iterator[None]:
    """Fit these parts for as long as a user gets them, where nothing else is set."""
    from alphastomics.config import TrainingConfig, auto

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "COUNT_UPDATES", {"cpu": 600, "gpu": 1_500})
        patch.setattr(auto, "HEAD_UPDATES", TrainingConfig().position_head_updates)
        patch.setattr(auto, "LEAST_HEAD_UPDATES", 100)
        yield


@pytest.fixture
def quick_training(monkeypatch) -> None:
    """Shorten trainings with nothing set, and the baselines of their verdict, to a few seconds.

    For tests whose claim is not how good the model is: tests/test_reconstruction.py asks for that.
    """
    from alphastomics.config import auto
    from alphastomics.evaluation import baselines

    for name in ("UPDATES", "LEAST_UPDATES", "LEAST_UPDATES_CPU"):
        monkeypatch.setattr(auto, name, 10)
    monkeypatch.setattr(baselines, "TREES", 5)


@pytest.fixture
def run_cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program as a user does, in an empty working folder."""

    def run(*arguments: object, cwd: Path = tmp_path, **environment: str):
        return subprocess.run(
            [sys.executable, "-m", "alphastomics", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run
