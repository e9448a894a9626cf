"""Weights & Biases: online for whoever is logged in or asks, and one run for each training.

The library is a stand-in here, below Lightning's own logger: it needs an account and a network.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import wandb as lightning_wandb

from alphastomics.diffusion_model.tracking import wandb_mode


class FakeRun:
    """A run of Weights & Biases that remembers what it was told."""

    def __init__(self, library: ModuleType, options: dict[str, Any]) -> None:
        self.library, self.options, self.logged = library, options, {}
        self.config = SimpleNamespace(update=lambda *_, **__: None)

    def log(self, values: dict[str, Any], **_: Any) -> None:
        self.logged |= values

    def finish(self) -> None:
        self.library.run = None

    def define_metric(self, *_: Any, **__: Any) -> None: ...


@pytest.fixture
def started(monkeypatch) -> list[FakeRun]:
    """Runs that were started in place of real ones."""
    runs: list[FakeRun] = []
    library, kinds = ModuleType("wandb"), ModuleType("wandb.wandb_run")
    parts, disabled = ModuleType("wandb.sdk"), ModuleType("wandb.sdk.lib")

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(library, options))
        library.run = runs[-1]
        return runs[-1]

    library.run, library.init = None, init
    kinds.Run, disabled.RunDisabled = FakeRun, type("RunDisabled", (), {})
    for module in (library, kinds, parts, disabled):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(lightning_wandb, "_WANDB_AVAILABLE", True)
    return runs


def surroundings(monkeypatch, tmp_path, environment: dict[str, str], netrc: str) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "netrc").write_text(netrc + "\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize(
    ("environment", "netrc", "mode"),
    [({}, "", "offline"), ({"WANDB_API_KEY": "k"}, "", "online"),
     ({}, "machine api.wandb.ai login user password key", "online"),
     ({}, "machine example.com login user password key", "offline"),
     ({"WANDB_MODE": "online"}, "", "online"),
     ({"WANDB_MODE": "offline", "WANDB_API_KEY": "k"}, "", "offline")],
)  # fmt: skip
def test_tracking_is_online_for_who_is_logged_in_or_asks(
    environment, netrc, mode, tmp_path, monkeypatch
):
    surroundings(monkeypatch, tmp_path, environment, netrc)
    assert wandb_mode() == mode


@pytest.mark.parametrize(
    ("environment", "mode"), [({}, "offline"), ({"WANDB_API_KEY": "k"}, "online")]
)
def test_a_training_is_one_run_under_its_name_with_the_documented_metrics(
    environment, mode, started, run, tmp_path, monkeypatch
):
    surroundings(monkeypatch, tmp_path, environment, "")
    for name in ("first", "second"):
        run(name, logging={"logger": "wandb"}, training={"max_epochs": 1})
    assert [one.options["name"] for one in started] == ["first", "second"]
    for one in started:
        assert one.options["project"] == "alphastomics"
        assert one.options["mode"] == mode
        assert {"train/loss", "val/loss", "gate/activation_mean"} <= set(one.logged)
