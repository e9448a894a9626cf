"""Weights & Biases: online for whoever is logged in or asks for it, offline for all others."""

import netrc
import os
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse

from lightning.pytorch.loggers import WandbLogger

from alphastomics.config import LoggingConfig

WANDB_HOST = "https://api.wandb.ai"
WandbMode = Literal["online", "offline", "disabled", "shared"]
MODES: tuple[WandbMode, ...] = ("online", "offline", "disabled", "shared")


def wandb_mode() -> WandbMode:
    """Return how a run is tracked: WANDB_MODE, or online with a key, or offline."""
    asked = os.environ.get("WANDB_MODE", "")
    named = next((mode for mode in MODES if mode == asked), None)
    if named is not None:
        return named
    return "online" if os.environ.get("WANDB_API_KEY") or has_login() else "offline"


def has_login() -> bool:
    """Say whether `wandb login` has left a key on this machine."""
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    host = urlparse(os.environ.get("WANDB_BASE_URL") or WANDB_HOST).hostname or ""
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class OneRun(WandbLogger):
    """A logger that ends its run with the training.

    Otherwise the second training of a process, on everything, would go on in the run of the first.
    """

    def finalize(self, status: str) -> None:
        """End the run."""
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish()


def wandb_logger(settings: LoggingConfig, folder: Path) -> WandbLogger:
    """Return the logger of a run, by its name in the project."""
    return OneRun(
        project=settings.wandb_project,
        name=settings.exp_name,
        save_dir=str(folder),
        mode=wandb_mode(),
    )
