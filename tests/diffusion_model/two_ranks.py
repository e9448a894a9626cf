"""What each rank does for test_distributed: torchrun starts it; it trains one run after another.

One launch for all runs, since starting two interpreters takes longer than training in them.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.train import TrainRequest, train
from tests.diffusion_model.conftest import tiny_config
from tests.diffusion_model.test_resume import Cut, cut_at

EPOCHS, CUT_AT = 4, 2


def sections(strategy: str, batch_size: int) -> dict:
    """Settings under which two ranks see in each step what one rank of twice the batch sees.

    An epoch is one step, so that the ranks' shares together are the whole epoch; all sets are full
    and only positions are noised, so that the ranks' means are over equally many pairs.
    """
    return {
        "model": {"dropout": 0.0},
        "training": {
            "batch_size": batch_size,
            "max_epochs": EPOCHS,
            "mode": "expr_to_pos",
            "position_head_updates": 5,
        },
        "data": {"loading": {"set_size": 42, "set_draw": "random"}},
        "distributed": {"strategy": strategy},
    }


def uneven() -> dict:
    """Settings under which the ranks' shares differ, and the weights stay as they began."""
    return {
        "model": {"dropout": 0.0},
        "training": {
            "batch_size": 32,
            "max_epochs": 1,
            "learning_rate": 1e-12,
            "position_head_updates": 5,
        },
        "data": {"loading": {"set_size": 32, "set_draw": "slice"}},
    }


def run(name: str, request: TrainRequest, settings: dict) -> None:
    """Train a run of that name."""
    settings = {**settings, "logging": {"exp_name": name, "save_top_k": 1}}
    train(tiny_config(PROCESSED, FOLDER, **settings), request)


def cut_and_resume(settings: dict) -> None:
    """Cut a sharded run, and go on with it sharded, and with a copy of it unsharded."""
    with pytest.MonkeyPatch.context() as patch:
        cut_at(CUT_AT, patch)
        with pytest.raises(Cut):
            run("cut", TrainRequest(), settings)
    torch.distributed.barrier()
    if RANK == 0:
        shutil.copytree(FOLDER / "cut", FOLDER / "moved")
    torch.distributed.barrier()
    run("cut", TrainRequest(resume="last"), settings)
    run("moved", TrainRequest(resume="last"), sections("ddp", 126))


def count_experts(settings: dict) -> None:
    """Write down what the routers of this rank did in each step, and the bias after it."""
    steps = []
    original = AlphaSTomicsModule.balance_experts

    def balance_experts(self: AlphaSTomicsModule) -> None:
        routing = self.last.prediction.aux.routing
        original(self)
        bias = torch.stack([moe.balance_bias.clone() for moe in self.model.mixtures()])
        steps.append((routing.counts, routing.probability, routing.num_cells, bias))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlphaSTomicsModule, "balance_experts", balance_experts)
        layer = {"use_moe": True, "moe_balance": "bias"}
        run("experts", TrainRequest(), {**settings, "TransformerLayer_setting": layer})
    torch.save(steps, FOLDER / f"experts{RANK}.pt")


if __name__ == "__main__":
    PROCESSED, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
    RANK = int(os.environ["RANK"])
    strategies = sys.argv[3:]
    for name in strategies:
        run(name, TrainRequest(), sections(name, 126))
    run("uneven", TrainRequest(), uneven())
    cut_and_resume(sections(strategies[-1], 126))
    count_experts(sections(strategies[-1], 126))
