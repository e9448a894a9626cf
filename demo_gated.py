"""The model with gated attention, part by part, each step checked: python demo_gated.py."""

import sys

from alphastomics.main import answer
from examples.showcase.commands import showcase

# Spelled like config.yaml; what is not here keeps its default.
DEMO_CONFIG = {
    "seed": {"global_seed": 42},
    "simulation": {"cells": 1500, "slices": 2, "genes": 60},
    "model": {"d_model": 64, "d_ff": 256},
    "diffusion": {"num_timesteps": 1000, "schedule": "cosine"},
    "training": {
        "batch_size": 256,
        "max_epochs": 24,
        "learning_rate": 2.0e-3,
        "early_stopping": False,
    },
    "masking": {"enable": False, "expression_mask_ratio": 0.3, "position_mask_ratio": 0.33},
    "data": {
        "preprocessing": {"split_by": "cell", "train_ratio": 0.8, "val_ratio": 0.1},
        "loading": {"set_size": 128, "set_draw": "slice", "num_workers": 0},
    },
    "sampling": {"num_steps": 15},
    "TransformerLayer_setting": {
        "num_layers": 3,
        "num_heads": 4,
        "dropout": 0.1,
        "use_gated_attention": True,
        "gate_type": "headwise",
        "use_qk_norm": True,
        "use_moe": False,
    },
}

if __name__ == "__main__":
    sys.exit(answer(lambda: showcase(DEMO_CONFIG, sys.argv[1:])))
