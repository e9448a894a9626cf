"""Resuming: to the bit what an uninterrupted run gives, wherever it was cut."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch.strategies import Strategy

from alphastomics.config.file import to_yaml
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.diffusion_model.train import TrainRequest
from tests.diffusion_model.conftest import equal, logged, tiny_config, weights

ROOT = Path(__file__).parent.parent.parent


class Cut(Exception):
    """Stands for a machine that dies."""


def cut_at(step: int, monkeypatch) -> None:
    original = AlphaSTomicsModule.training_step

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == step:
            raise Cut
        return original(self, batch, batch_idx)

    monkeypatch.setattr(AlphaSTomicsModule, "training_step", training_step)


VARIANTS = {
    "in memory": {},
    "two workers": {"data": {"loading": {"num_workers": 2}}},
    "streaming": {"data": {"loading": {"streaming": True, "buffer_size": 100}}},
    "streaming, two workers, slices": {
        "data": {
            "loading": {
                "streaming": True,
                "buffer_size": 100,
                "num_workers": 2,
                "set_size": 32,
                "set_draw": "slice",
            }
        }
    },
    "experts and masking": {
        "TransformerLayer_setting": {"use_moe": True, "moe_balance": "bias"},
        "masking": {"enable": True, "progressive_masking": True, "progressive_steps": 5},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_cut_anywhere_resumes_to_the_same_bits(variant: str, run, monkeypatch):
    sections = VARIANTS[variant]
    whole = run("whole", **sections)
    steps = int(json.loads((whole.path / "status.json").read_text())["step"])
    # Within the second epoch, at the end of the first, and (once) within that.
    cuts = (steps // 2 + 1, steps // 2, 1)
    for step in cuts if variant == "in memory" else cuts[:2]:
        name = f"cut{step}"
        with pytest.MonkeyPatch.context() as patch:
            cut_at(step, patch)
            with pytest.raises(Cut):
                run(name, **sections)
        resumed = run(name, TrainRequest(resume="last"), **sections)
        assert equal(weights(resumed), weights(whole))
        assert logged(resumed) == logged(whole)


def test_a_checkpoint_several_steps_old_is_as_good(run, monkeypatch):
    sections = {"logging": {"save_every_n_steps": 3}}
    whole = run("whole", **sections)
    with pytest.MonkeyPatch.context() as patch:
        cut_at(5, patch)
        with pytest.raises(Cut):
            run("cut", **sections)
    resumed = run("cut", TrainRequest(resume="last"), **sections)
    assert equal(weights(resumed), weights(whole))
    assert logged(resumed) == logged(whole)


def test_a_run_cut_in_its_validation_resumes_to_the_same_bits(run):
    whole = run("whole")

    def validation_step(self, batch, batch_idx):
        raise Cut

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlphaSTomicsModule, "validation_step", validation_step)
        with pytest.raises(Cut):
            run("cut")
    resumed = run("cut", TrainRequest(resume="last"))
    assert equal(weights(resumed), weights(whole))
    assert logged(resumed) == logged(whole)


def test_checkpoints_that_are_held_back_are_written_where_the_gpu_has_failed(run):
    whole = run("whole", logging={"save_every_n_steps": 1000})

    def teardown(self):
        raise RuntimeError("the GPU has failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strategy, "teardown", teardown)  # which would have them written
        cut_at(10, patch)
        with pytest.raises(RuntimeError, match="the GPU has failed"):
            run("cut", logging={"save_every_n_steps": 1000})
    cut = RunFolder(whole.path.parent / "cut")
    assert cut.last.is_file()
    assert json.loads((cut.path / "status.json").read_text())["state"] == "failed"
    resumed = run("cut", TrainRequest(resume="last"), logging={"save_every_n_steps": 1000})
    assert equal(weights(resumed), weights(whole))
    assert logged(resumed) == logged(whole)


def test_the_same_seed_gives_the_same_run_whatever_the_workers(run):
    first = run("first", seed={"global_seed": 3})
    second = run("second", seed={"global_seed": 3}, data={"loading": {"num_workers": 3}})
    other = run("other", seed={"global_seed": 4})
    assert equal(weights(first), weights(second))
    assert logged(first) == logged(second)
    assert not equal(weights(first), weights(other))


def command(processed: Path, tmp_path: Path, name: str, epochs: int) -> list[str]:
    parts = {"training": {"max_epochs": epochs}, "logging": {"exp_name": name}}
    config = tiny_config(processed, tmp_path, expression={"updates": 5}, **parts)
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config))
    return [sys.executable, "-m", "alphastomics", "train", "--config", str(path),
            "--exp_name", name, "--resume", "last"]  # fmt: skip


def start(arguments: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_steps(folder: RunFolder, steps: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if folder.metrics.is_file() and len(folder.metrics.read_text().splitlines()) > 12 * steps:
            return
        if process.poll() is not None:
            break
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"the run did not begin: {process.communicate()}")


def test_sigterm_saves_marks_the_run_and_exits_with_143(processed, tmp_path: Path):
    folder = RunFolder(tmp_path / "stopped")
    process = start(command(processed, tmp_path, "stopped", 500))
    wait_for_steps(folder, 3, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    status = json.loads((folder.path / "status.json").read_text())
    assert status["state"] == "interrupted"
    assert folder.last.is_file()
    assert not list(folder.checkpoints.glob("*.partial"))
    assert "Traceback" not in errors


def finish(process: subprocess.Popen) -> int:
    process.communicate(timeout=300)
    return process.returncode


@pytest.mark.slow
def test_kill_9_and_resume_gives_the_same_bits(processed, tmp_path: Path):
    assert finish(start(command(processed, tmp_path, "whole", 6))) == 0
    killed = start(command(processed, tmp_path, "killed", 6))
    folder = RunFolder(tmp_path / "killed")
    wait_for_steps(folder, 4, killed)
    killed.kill()
    assert finish(killed) == -signal.SIGKILL
    assert finish(start(command(processed, tmp_path, "killed", 6))) == 0
    whole = RunFolder(tmp_path / "whole")
    assert equal(weights(whole), weights(folder))
    assert logged(whole) == logged(folder)
