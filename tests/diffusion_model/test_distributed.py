"""Two ranks on a CPU: the same numbers as one, files written once, and an end that is agreed on."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from alphastomics.attn_model.routing import balance_loss, balanced_bias, normalized_use_entropy
from alphastomics.config import DistributedConfig
from alphastomics.config.file import to_yaml
from alphastomics.diffusion_model.checkpoint import load_module
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.diffusion_model.strategy import Devices, choose_devices, choose_strategy
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.errors import InputError
from tests.diffusion_model.conftest import equal, logged, tiny_config, weights
from tests.diffusion_model.test_resume import ROOT, wait_for_steps
from tests.diffusion_model.two_ranks import EPOCHS, sections, uneven

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


class Runs(NamedTuple):
    """Runs of two ranks, by strategy, beside `one` rank with a batch of twice the size."""

    folder: Path
    strategies: list[str]

    def __getitem__(self, name):
        return RunFolder(self.folder / name)

    @property
    def sharded(self) -> RunFolder:
        return self[self.strategies[-1]]


HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
NEEDS_DEEPSPEED = pytest.mark.skipif(
    not HAS_DEEPSPEED, reason="DeepSpeed is not installed: pip install 'alphastomics[deepspeed]'"
)


@pytest.fixture(
    scope="module",
    params=["ddp fsdp", pytest.param("deepspeed", marks=[pytest.mark.slow, NEEDS_DEEPSPEED])],
)
def runs(request, processed_in_one_frame: Path, tmp_path_factory) -> Runs:
    """What two_ranks.py trains, in one launch."""
    folder = tmp_path_factory.mktemp("runs")
    strategies = request.param.split()
    process = torchrun(
        "tests.diffusion_model.two_ranks", processed_in_one_frame, folder, *strategies
    )
    for name, settings in {"one": sections("auto", 252), "one_uneven": uneven()}.items():
        logging = {"exp_name": name, "save_top_k": 1}
        train(
            tiny_config(processed_in_one_frame, folder, **settings, logging=logging), TrainRequest()
        )
    _, errors = finished(process)
    assert process.returncode == 0, errors
    return Runs(folder, strategies)


def series(folder: RunFolder, name: str) -> list[float]:
    """Return the logged values of a name, by step."""
    rows = [(int(step), float(value)) for step, _, known, value in logged(folder) if known == name]
    return [value for _, value in sorted(rows)]


def test_two_ranks_train_as_one_does_on_the_same_cells(runs: Runs):
    one = runs["one"]
    expected = weights(one)
    parameters = [name for name in expected if name.startswith("model.")]
    for two in map(runs.__getitem__, runs.strategies):
        for name in ("train/loss", "train/position", "train/grad_norm"):
            values = series(two, name)
            assert len(values) == EPOCHS
            assert values == pytest.approx(series(one, name), rel=1e-5)
        found = weights(two)
        assert expected.keys() == found.keys()
        for number, name in enumerate(parameters):
            moment = expected[f"{number}.exp_avg"]
            torch.testing.assert_close(found[f"{number}.exp_avg"], moment, rtol=1e-4, atol=NOISE)
            real = moment.abs() > 10 * NOISE
            for key in (name, name.replace("model.", "average.", 1)):
                torch.testing.assert_close(found[key][real], expected[key][real], rtol=0, atol=1e-5)


def test_validation_is_the_mean_over_cells_however_they_are_shared_out(runs: Runs):
    expected = series(runs["one_uneven"], "val/loss")
    assert series(runs["uneven"], "val/loss") == pytest.approx(expected, rel=1e-5)


def test_only_one_rank_writes(runs: Runs):
    expected = [row[:3] for row in logged(runs["one"])]
    for folder in map(runs.__getitem__, runs.strategies):
        assert [row[:3] for row in logged(folder)] == expected
        status = json.loads((folder.path / "status.json").read_text())
        assert status == {"state": "finished", "step": EPOCHS}
        assert not list(folder.path.rglob("*.partial"))


def test_a_sharded_run_leaves_a_checkpoint_that_one_process_reads(runs: Runs):
    module, genes = load_module(runs.sharded.last)
    expected, _ = load_module(runs["one"].last)
    assert len(genes) == module.model.num_genes
    assert module.position_scale == expected.position_scale
    assert int(module.updates) == EPOCHS


def test_a_sharded_run_resumes_to_the_same_bits(runs: Runs):
    assert equal(weights(runs["cut"]), weights(runs.sharded))
    assert logged(runs["cut"]) == logged(runs.sharded)


def test_a_sharded_run_goes_on_unsharded(runs: Runs):
    expected = series(runs.sharded, "train/loss")
    assert series(runs["moved"], "train/loss") == pytest.approx(expected, rel=1e-5)


def test_router_statistics_are_those_of_the_cells_of_both_ranks(runs: Runs):
    ranks = [torch.load(runs.folder / f"experts{rank}.pt", weights_only=True) for rank in (0, 1)]
    entropies = series(runs["experts"], "moe/expert_entropy_normalized")
    penalties = series(runs["experts"], "moe/avg_aux_loss")
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


def test_sigterm_to_torchrun_saves_and_a_second_run_is_refused(
    processed_in_one_frame: Path, tmp_path: Path
):
    settings = {**sections("ddp", 126), "logging": {"exp_name": "stopped"}}
    settings["training"] = {**settings["training"], "max_epochs": 5000, "early_stopping": False}
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(tiny_config(processed_in_one_frame, tmp_path, **settings)))
    command = ("alphastomics", "train", "--config", path, "--exp_name", "stopped")
    folder = RunFolder(tmp_path / "stopped")
    process = torchrun(*command)
    wait_for_steps(folder, 3, process)
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


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("distributed", {"deepspeed": {"stage": 3}}, "set deepspeed.stage: 2"),
        ("training", {"precision": "bf16"}, "use --precision 32"),
        ("training", {"accumulate_grad_batches": 2}, "use a larger batch"),
        pytest.param(
            "distributed",
            {},
            "DeepSpeed is not installed; pip install",
            marks=pytest.mark.skipif(HAS_DEEPSPEED, reason="DeepSpeed is installed"),
        ),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(section, values, said, processed, tmp_path):
    settings = {"distributed": {"strategy": "deepspeed"}}
    settings[section] = {**settings.get(section, {}), **values}
    config = tiny_config(processed, tmp_path, **settings)
    with pytest.raises(InputError, match=f"{said}.*, or use --strategy fsdp"):
        choose_strategy(config, Devices("cpu", 2))


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [{}, {"use_moe": True, "num_experts": 2, "moe_top_k": 1}])
def test_one_rank_over_nccl_trains_as_one_gpu_alone(processed_in_one_frame, tmp_path, layer):
    losses = {}
    for strategy in ("auto", "ddp", "fsdp"):
        settings = {
            "distributed": {"strategy": strategy, "devices": 1},
            "training": {"precision": "bf16"},
            "TransformerLayer_setting": layer,
            "logging": {"exp_name": strategy},
        }
        path = tmp_path / f"{strategy}.yaml"
        path.write_text(to_yaml(tiny_config(processed_in_one_frame, tmp_path, **settings)))
        command = [sys.executable, "-m", "alphastomics", "train", "--config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        module, _ = load_module(RunFolder(tmp_path / strategy).last)
        assert all(bool(torch.isfinite(weight).all()) for weight in module.parameters())
        values = [(step, value) for step, _, name, value in logged(RunFolder(tmp_path / strategy))
                  if name == "train/loss"]  # fmt: skip
        losses[strategy] = [float(value) for _, value in values]
    for strategy in ("ddp", "fsdp"):
        assert losses[strategy] == pytest.approx(losses["auto"], rel=2e-2), strategy
