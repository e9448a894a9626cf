"""Two ranks on a CPU: the same numbers as one, files written once, and an end that is agreed on."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alphastomics.attn_model.routing import balance_loss, balanced_bias, normalized_use_entropy
from alphastomics.config import DistributedConfig
from alphastomics.config_file import to_yaml
from alphastomics.diffusion_model.checkpoint import load_module
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.diffusion_model.spread import choose_devices
from alphastomics.diffusion_model.train import Request, train
from alphastomics.errors import InputError
from tests.diffusion_model.conftest import logged, tiny_config, weights
from tests.diffusion_model.test_resume import ROOT, wait_for_steps
from tests.diffusion_model.two_ranks import EPOCHS, sections

# Below this a gradient is what rounding left of zero: Adam divides it by itself, and the sign of
# noise decides where the weight goes. The loss does not depend on such a weight.
NOISE = 1e-6


def torchrun(*arguments: object) -> subprocess.Popen:
    """Start a module on two ranks, on a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(port), "-m", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process: subprocess.Popen) -> tuple[str, str]:
    """Wait for a launch to end; return what it said to stdout and stderr."""
    try:
        return process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.fixture(scope="module")
def runs(processed: Path, tmp_path_factory) -> Path:
    """The runs of two_ranks.py, and `one`: the same on one rank with a batch of twice the size."""
    folder = tmp_path_factory.mktemp("runs")
    process = torchrun("tests.diffusion_model.two_ranks", processed, folder)
    settings = {**sections("auto", 252), "logging": {"exp_name": "one"}}
    train(tiny_config(processed, folder, **settings), Request())
    _, errors = finished(process)
    assert process.returncode == 0, errors
    return folder


def series(folder: RunFolder, name: str) -> list[float]:
    """Return the logged values of a name, by step."""
    rows = [(int(step), float(value)) for step, _, known, value in logged(folder) if known == name]
    return [value for _, value in sorted(rows)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_as_one_does_on_the_same_cells(strategy: str, runs: Path):
    one, two = RunFolder(runs / "one"), RunFolder(runs / strategy)
    for name in ("train/loss", "train/position", "train/grad_norm"):
        values = series(two, name)
        assert len(values) == EPOCHS
        assert values == pytest.approx(series(one, name), rel=1e-5)
    expected, found = weights(one), weights(two)
    assert expected.keys() == found.keys()
    parameters = [name for name in expected if name.startswith("model.")]
    for number, name in enumerate(parameters):
        moment = expected[f"{number}.exp_avg"]
        torch.testing.assert_close(found[f"{number}.exp_avg"], moment, rtol=1e-4, atol=NOISE)
        real = moment.abs() > 10 * NOISE
        for key in (name, name.replace("model.", "average.", 1)):
            torch.testing.assert_close(found[key][real], expected[key][real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_only_one_rank_writes(strategy: str, runs: Path):
    one, two = logged(RunFolder(runs / "one")), logged(RunFolder(runs / strategy))
    assert [row[:3] for row in two] == [row[:3] for row in one]
    status = json.loads((runs / strategy / "status.json").read_text())
    assert status == {"state": "finished", "step": EPOCHS}
    assert not list((runs / strategy).rglob("*.partial"))


def test_a_sharded_run_leaves_a_checkpoint_that_one_process_reads(runs: Path):
    module, genes = load_module(RunFolder(runs / "fsdp").last)
    expected, _ = load_module(RunFolder(runs / "one").last)
    assert len(genes) == module.model.num_genes
    assert module.position_scale == expected.position_scale
    assert int(module.updates) == EPOCHS


def test_a_sharded_run_resumes_to_the_same_bits(runs: Path):
    whole, cut = RunFolder(runs / "fsdp"), RunFolder(runs / "cut")
    expected, found = weights(whole), weights(cut)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert logged(cut) == logged(whole)


def test_a_sharded_run_goes_on_unsharded(runs: Path):
    expected = series(RunFolder(runs / "fsdp"), "train/loss")
    assert series(RunFolder(runs / "moved"), "train/loss") == pytest.approx(expected, rel=1e-5)


def test_router_statistics_are_those_of_the_cells_of_both_ranks(runs: Path):
    ranks = [torch.load(runs / f"experts{rank}.pt", weights_only=True) for rank in (0, 1)]
    folder = RunFolder(runs / "experts")
    entropies = series(folder, "moe/expert_entropy_normalized")
    penalties = series(folder, "moe/avg_aux_loss")
    bias = torch.zeros_like(ranks[0][0][3])
    for step, (one, other) in enumerate(zip(*ranks, strict=True)):
        counts, probability, cells = (a + b for a, b in zip(one[:3], other[:3], strict=True))
        assert not torch.equal(one[0], other[0])
        bias = torch.stack([balanced_bias(*layer) for layer in zip(bias, counts, strict=True)])
        assert torch.equal(one[3], bias)
        assert torch.equal(other[3], bias)
        losses = torch.stack(list(map(balance_loss, counts, probability, cells)))
        assert penalties[step] == pytest.approx(float(losses.mean()), rel=1e-6)
        assert entropies[step] == pytest.approx(float(normalized_use_entropy(counts).mean()))
    assert len(entropies) == len(ranks[0]) == EPOCHS


def test_sigterm_to_torchrun_saves_and_a_second_run_is_refused(processed: Path, tmp_path: Path):
    settings = {**sections("ddp", 126), "logging": {"exp_name": "stopped"}}
    settings["training"] = {**settings["training"], "max_epochs": 5000, "early_stopping": False}
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(tiny_config(processed, tmp_path, **settings)))
    command = ("alphastomics", "train", "--config", path, "--exp_name", "stopped")
    folder = RunFolder(tmp_path / "stopped")
    process = torchrun(*command)
    wait_for_steps(folder, 3)
    process.send_signal(signal.SIGTERM)
    _, errors = finished(process)
    assert errors.count("go on with --resume last") == 1, errors
    status = json.loads((folder.path / "status.json").read_text())
    assert status["state"] == "interrupted"
    module, _ = load_module(folder.last)
    assert int(module.updates) == status["step"]
    # Rank 0 alone looks at the folder; the other one must not wait for it.
    again = torchrun(*command)
    said, errors = finished(again)
    assert again.returncode != 0
    assert errors.count("holds a run already; go on with --resume last") == 1, errors
    assert "SIGKILL" not in errors
    assert said == ""


@pytest.mark.parametrize(
    ("nodes", "environment", "said"),
    [
        (2, {}, "--num_nodes 2 .* start the program on every machine"),
        (
            2,
            {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "torchrun started 2 processes, but --gpus and --num_nodes ask for 2 x 2",
        ),
    ],
)
def test_a_launch_that_cannot_meet_is_refused(nodes: int, environment, said: str, monkeypatch):
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=said):
        choose_devices(DistributedConfig(devices=0, num_nodes=nodes))
