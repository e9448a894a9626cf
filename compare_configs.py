"""Baseline, Gated, MoE, Gated + MoE on equal budgets: python compare_configs.py [--full].

docs/ablation.md says what is measured, which differences exceed the noise, and what is written.
"""

import sys

from alphastomics.main import answer
from benchmarks.ablation.commands import compare_configs

# Spelled like config.yaml; what is not here keeps its default. Each configuration then switches
# gated attention and experts on or off; which gate, and which experts, stands here.
BASE_CONFIG = {
    "seed": {"global_seed": 42},  # of the simulated tissue and its split; runs have --seeds
    "simulation": {"cells": 800, "slices": 8, "genes": 80},
    "model": {"d_model": 64, "d_ff": 256},
    "training": {
        "mode": "joint",
        "batch_size": 512,
        "max_epochs": 25,
        "learning_rate": 2.0e-3,
        "early_stopping": False,
    },
    "data": {
        "preprocessing": {
            "split_by": "slice",
            "train_ratio": 0.625,
            "val_ratio": 0.125,
            "cell_type_key": "cell_type",
        },
        "loading": {"set_size": 256, "set_draw": "slice", "num_workers": 0},
    },
    "sampling": {"num_samples": 4},
    "logging": {"log_every_n_steps": 5, "save_top_k": 0},
    "TransformerLayer_setting": {
        "num_layers": 3,
        "num_heads": 4,
        "dropout": 0.1,
        "gate_type": "headwise",
        "use_qk_norm": True,
        "num_experts": 4,
        "moe_top_k": 2,
        "moe_load_balance_loss_weight": 0.01,
    },
}

if __name__ == "__main__":
    sys.exit(answer(lambda: compare_configs(BASE_CONFIG, sys.argv[1:])))
