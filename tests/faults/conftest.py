"""One tiny tissue, processed folder and checkpoint for all hostile inputs, and the door itself."""

import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from alphastomics.main import main
from tests.faults.door import Outcome, attempt

CONFIG = """
model: {d_model: 8, n_heads: 2, n_layers: 1}
training: {batch_size: 32, max_epochs: 1, learning_rate: 1.0e-3, position_head_updates: 3}
data: {processed_data_dir: PROCESSED, loading: {num_workers: 0}}
sampling: {num_steps: 2, num_samples: 1}
distributed: {devices: 0}
"""


@dataclass(frozen=True)
class Tiny:
    """Where the parts of the tiny job lie; tests read them and never write there."""

    home: Path

    @property
    def slices(self) -> Path:
        return self.home / "slices"

    @property
    def slice(self) -> Path:
        return self.slices / "slice_0.h5ad"

    @property
    def genes(self) -> Path:
        return self.home / "genes.txt"

    @property
    def config(self) -> Path:
        return self.home / "tiny.yaml"

    @property
    def stage1(self) -> Path:
        return self.home / "stage1"

    @property
    def processed(self) -> Path:
        return self.home / "processed"

    @property
    def run(self) -> Path:
        return self.home / "outputs/alphastomics"

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints/last.ckpt"

    @property
    def export(self) -> Path:
        return self.run / "export"


def call(*words: object) -> str:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([str(word) for word in words])
    assert status == 0, err.getvalue()
    return out.getvalue()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Simulate, preprocess and train once, through the door."""
    made = Tiny(tmp_path_factory.mktemp("tiny"))
    made.config.write_text(CONFIG.replace("PROCESSED", str(made.processed)))
    call("simulate", "--output_dir", made.slices, "--cells", 40, "--slices", 2, "--genes", 20)
    types = ("--cell_type_key", "cell_type")
    call("preprocess", "--input_dir", made.slices, "--output_dir", made.processed, *types)
    metadata = (made.processed / "metadata.json").read_text()
    made.genes.write_text("\n".join(json.loads(metadata)["genes"]) + "\n")
    listed = ("--gene_list_file", made.genes)
    call("stage1", "--input_dir", made.slices, "--output_dir", made.stage1, *listed)
    call("train", "--config", made.config, "--output_dir", made.home / "outputs")
    return made


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """A folder with `work`, where the program runs, and `outside`, where it has no business."""
    for name in ("work", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside/precious.txt").write_text("precious")
    return tmp_path


@pytest.fixture
def work(sandbox: Path) -> Path:
    """The program's working folder."""
    return sandbox / "work"


@pytest.fixture
def door(sandbox: Path, tiny: Tiny) -> Callable[..., Outcome]:
    """Call the program in the sandbox."""

    def call_it(*argv: object) -> Outcome:
        return attempt(argv, sandbox, tiny.home)

    return call_it


@pytest.fixture
def own_slices(tiny: Tiny, work: Path) -> Path:
    """A copy of the slices, for a test to spoil."""
    return Path(shutil.copytree(tiny.slices, work / "slices"))


@pytest.fixture
def own_processed(tiny: Tiny, work: Path) -> Path:
    """A copy of the processed folder, for a test to spoil."""
    return Path(shutil.copytree(tiny.processed, work / "processed"))


@pytest.fixture
def own_run(tiny: Tiny, work: Path) -> Path:
    """A copy of the run's folder, for a test to spoil."""
    return Path(shutil.copytree(tiny.run, work / "run"))
