"""The demos: all checks hold on a tiny tissue, and a broken part is told."""

import copy
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alphastomics.attn_model.model import Model
from alphastomics.diffusion_model.noise import NoiseModel
from alphastomics.errors import InputError
from alphastomics.main import answer
from examples.showcase import parts
from examples.showcase.checks import Check
from examples.showcase.commands import parser as flags_of
from examples.showcase.commands import prepared, settings_of, showcase

ROOT = Path(__file__).parents[2]
DEMOS = ("demo_gated", "demo_gated_moe")


def demo_config(name: str) -> dict:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DEMO_CONFIG


def tiny(name: str) -> dict:
    """The demo's own settings, with a small network on few cells."""
    document = copy.deepcopy(demo_config(name))
    document["simulation"] = {"cells": 400, "slices": 1, "genes": 24}
    document["model"] = {"d_model": 32, "d_ff": 64}
    document["diffusion"] = {"num_timesteps": 20}
    document["training"] |= {"batch_size": 64, "max_epochs": 30, "learning_rate": 3e-3}
    document["training"]["ema_decay"] = 0.9
    document["data"]["preprocessing"] |= {"train_ratio": 0.6}
    document["data"]["loading"]["set_size"] = 64
    document["sampling"] = {"num_steps": 5}
    document["TransformerLayer_setting"] |= {"num_layers": 2, "num_heads": 2}
    return document


@pytest.mark.parametrize("name", DEMOS)
def test_every_check_of_a_demo_holds(name, tmp_path, capsys):
    summary = showcase(tiny(name), ["--output_dir", str(tmp_path)])
    shown = capsys.readouterr().out
    number = shown.count("  ok  ")
    assert number > 15
    assert summary.startswith(f"{number} of {number} checks hold")
    assert "FAIL" not in shown
    for step in range(1, 7):
        assert f"\n{step}. " in shown
    assert ("experts" in shown) == (name == "demo_gated_moe")


def test_demos_have_the_documented_layers():
    gated, mixed = (demo_config(name)["TransformerLayer_setting"] for name in DEMOS)
    for layer in (gated, mixed):
        assert layer["use_gated_attention"]
        assert layer["gate_type"] == "headwise"
        assert layer["use_qk_norm"]
    assert not gated["use_moe"]
    assert (mixed["use_moe"], mixed["num_experts"], mixed["moe_top_k"]) == (True, 4, 2)


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> parts.Stage:
    config = settings_of(tiny("demo_gated_moe"), flags_of().parse_args([]))
    return prepared(config, tmp_path_factory.mktemp("stage"))


def failed(checks: list[Check]) -> str:
    return " / ".join(check.claim for check in checks if not check.holds)


def test_parts_do_not_touch_the_global_random_state(stage):
    before = torch.get_rng_state()
    for step in (parts.forward_pass, parts.masked_diffusion, parts.training_step):
        assert failed(step(stage)) == ""
    assert torch.equal(before, torch.get_rng_state())


def test_a_network_that_sees_the_order_of_cells_fails(stage, monkeypatch):
    plain = Model.forward

    def ordered(self, expression, position, *rest, **named):
        found = plain(self, expression, position, *rest, **named)
        return found._replace(position=found.position + torch.arange(position.shape[1])[:, None])

    monkeypatch.setattr(Model, "forward", ordered)
    assert "another order" in failed(parts.forward_pass(stage))


def test_a_network_that_looks_at_padding_fails(stage, monkeypatch):
    plain = Model.forward

    def looking(self, expression, *rest, **named):
        found = plain(self, expression, *rest, **named)
        return found._replace(expression=found.expression + expression.mean())

    monkeypatch.setattr(Model, "forward", looking)
    assert "padding" in failed(parts.forward_pass(stage))
    assert "hidden entries" in failed(parts.masked_diffusion(stage))


def test_a_schedule_that_loses_power_fails(stage, monkeypatch):
    plain = NoiseModel.alpha_sigma

    def weak(self, t, nu):
        alpha, sigma = plain(self, t, nu)
        return 0.9 * alpha, sigma

    monkeypatch.setattr(NoiseModel, "alpha_sigma", weak)
    told = failed(parts.noise_model(stage))
    assert "sigma² = 1" in told
    assert "time 0" in told


def test_a_loss_that_does_not_learn_fails(stage):
    training = stage.config.training.model_copy(update={"learning_rate": 0.0})
    still = replace(stage, config=stage.config.model_copy(update={"training": training}))
    assert "steps on one batch" in failed(parts.training_step(still))


def test_a_failed_check_is_status_1(monkeypatch, tmp_path, capsys):
    broken = Check("a claim", "2 (at most 1)", holds=False)
    monkeypatch.setattr(parts, "noise_model", lambda _stage: [broken])
    document = tiny("demo_gated")
    document["training"]["max_epochs"] = 1
    with pytest.raises(SystemExit) as left:
        answer(lambda: showcase(document, ["--output_dir", str(tmp_path)]))
    assert left.value.code == 1
    assert "FAIL  a claim: 2 (at most 1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--epochs", "0"], r"--epochs: expected .*, got 0"),
        (["--cells", "-3"], "--cells"),
        (["--seed", "-1"], "--seed"),
        (["--epochs", "many"], "invalid int"),
        (["--unknown"], "unrecognized"),
    ],
)
def test_a_wrong_flag_is_told_by_its_name(argv, words):
    with pytest.raises(InputError, match=words):
        showcase(demo_config("demo_gated"), argv)


@pytest.mark.parametrize("name", [*DEMOS, "compare_configs"])
def test_help_of_a_root_script_needs_no_torch(name):
    code = (
        f"import runpy, sys\nsys.argv = ['{name}.py', '--help']\n"
        f"try:\n    runpy.run_path('{name}.py', run_name='__main__')\n"
        "except SystemExit as left:\n"
        "    sys.exit(left.code or ('torch' in sys.modules) * 3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--output_dir" in done.stdout
