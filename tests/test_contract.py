"""The contract's own examples, as they are written there: Python, commands, files and numbers."""

import importlib
import json
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from alphastomics.attn_model import GatedMultiHeadAttention, MixtureOfExperts, TransformerLayer
from alphastomics.config import SimulationConfig
from alphastomics.diffusion_model import AlphaSTomicsModule
from alphastomics.main import main
from alphastomics.preprocessing.batch_loader import create_dataloaders
from alphastomics.simulate import write_tissue

GENES = 24
# Section 3, to the letter; what it leaves open (cfg, model, the arguments ...) is in `given`.
SNIPPET = """
from alphastomics.diffusion_model import (AlphaSTomicsModule, MaskedDiffusionModule, DiffusionSampler, DualModalLoss)
from alphastomics.attn_model import Model, TransformerLayer, GatedMultiHeadAttention, GatedSelfAttentionModel, MixtureOfExperts
from alphastomics.preprocessing.batch_loader import create_dataloaders

train_loader, val_loader, test_loader = create_dataloaders(data_dir="./processed", batch_size=64, streaming=True, buffer_size=50000)
module  = AlphaSTomicsModule(cfg, num_genes)                        # cfg: dict or the typed config; a LightningModule
sampler = DiffusionSampler(model, noise_model)
expression, positions = sampler.sample(expr, pos, mask, mode="joint")   # (B,N,G), (B,N,3), (B,N)
loss    = DualModalLoss(lambda_expression=1.0, lambda_position=1.0, lambda_masked_reconstruction=0.5)
expr_out, pos_out, time_out = GatedSelfAttentionModel(...)(expression_features, diffusion_time, position_features)  # (B,N,E), (B,T), (B,N,3)
"""  # noqa: E501 - the contract's own lines
CFG = {"model": {"d_model": 16, "n_heads": 2, "n_layers": 1}, "training": {"batch_size": 64}}
POSITION_KEYS = {
    "diffusion_model": "module noise loss sample train",
    "attn_model": "model transformer gated_attention moe layers",
    "preprocessing": "batch_loader",
    "utils": "dataholder metrics",
}


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A working folder with slices and, by section 2's first command, ./processed."""
    folder = tmp_path_factory.mktemp("contract")
    write_tissue(
        SimulationConfig(cells=90, slices=3, genes=GENES), 5, folder / "in", overwrite=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        called("preprocess --input_dir in --output_dir processed --cell_type_key cell_type")
    return folder


@pytest.fixture
def here(work, monkeypatch) -> Path:
    monkeypatch.chdir(work)
    return work


def called(line: str) -> None:
    assert main(line.split()) == 0, line


def test_the_python_of_section_3_runs_as_it_is_written(here):
    loader, validation, _ = create_dataloaders("processed", batch_size=64, num_workers=0)
    batch = next(iter(loader))
    trained = AlphaSTomicsModule(CFG, GENES)
    trainer = pl.Trainer(
        max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, accelerator="cpu",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Lightning's advice on workers and logging
        trainer.fit(trained, loader, validation)
    given = {
        "cfg": CFG, "num_genes": GENES, "model": trained.average,
        "noise_model": trained.noise_model, "expr": batch.expression, "pos": batch.positions,
        "mask": batch.node_mask, "expression_features": torch.randn(2, 6, 7),
        "diffusion_time": torch.rand(2, 1), "position_features": torch.randn(2, 6, 3),
    }  # fmt: skip
    snippet = SNIPPET.replace("(...)", "(7, d_model=16, n_heads=2, n_layers=1)")
    exec(snippet, given)
    assert given["expression"].shape == batch.expression.shape
    assert given["positions"].shape == batch.positions.shape
    # The user's units: micrometres, of which a slice has hundreds.
    assert float(given["positions"].std()) > 50
    shapes = [tuple(given[name].shape) for name in ("expr_out", "time_out", "pos_out")]
    assert shapes == [(2, 6, 7), (2, 1), (2, 6, 3)]


def test_layers_take_the_documented_keywords_and_count_the_documented_parameters():
    cells = torch.randn(2, 6, 128)
    GatedMultiHeadAttention(128, 4, gate_type="headwise", use_qk_norm=True)(cells)
    TransformerLayer(
        128, 4, d_ff=256, use_gated_attention=True, gate_type="headwise", use_qk_norm=True
    )
    experts = MixtureOfExperts(128, 256, 4, 2)
    experts(cells)
    assert sum(parameter.numel() for parameter in experts.parameters()) == 67_328
    assert {"expert_usage", "entropy", "balance_loss"} <= set(experts.get_moe_stats())


@pytest.mark.parametrize("package", POSITION_KEYS)
def test_modules_lie_where_they_are_documented(package):
    for name in POSITION_KEYS[package].split():
        assert importlib.import_module(f"alphastomics.{package}.{name}")


def test_the_two_stages_give_what_preprocess_gives(here):
    genes = json.loads((here / "processed/metadata.json").read_text())["genes"]
    (here / "genes.txt").write_text("\n".join(genes) + "\n")
    common = "--gene_list_file genes.txt --position_key spatial --z_spacing 10.0"
    for number in "AB":
        called(
            f"stage1 --input_dir in --output_dir {number} {common} --cell_type_key cell_type "
            "--max_cells_per_file 50000"
        )
    called(
        "stage2 --input_dirs A B --output_dir merged --train_ratio 0.8 --val_ratio 0.1 "
        "--max_shard_size 100 --split_by cell --seed 42"
    )
    metadata = json.loads((here / "merged/metadata.json").read_text())
    assert sum(split["cells"] for split in metadata["splits"].values()) == 2 * 3 * 90
    assert (here / "merged/data/train-00000.parquet").is_file()
    assert (here / "processed/data/train.parquet").is_file()
    assert (here / "processed/_intermediate_slices").is_dir()


@pytest.mark.usefixtures("quick_training")
def test_every_command_of_section_2_takes_its_flags(here):
    (here / "config.yaml").write_text(json.dumps(CFG))
    called(
        "train --config config.yaml --data-dir processed --batch_size 64 --epochs 1 --lr 1e-3 "
        "--training_mode joint --use_gated_attention --gate_type headwise --use_moe "
        "--num_experts 4 --moe_top_k 2 --enable_masking --expression_mask_ratio 0.3 "
        "--position_mask_ratio 0.33 --output_dir ./outputs --exp_name alphastomics --gpus 1 "
        "--num_workers 0 --precision auto --strategy auto --num_nodes 1 --seed 42 --num_genes 24"
    )
    checkpoint = "--checkpoint outputs/alphastomics/checkpoints/last.ckpt"
    called(
        "train --exp_name alphastomics --epochs 2 --batch_size 64 --resume last --lr 1e-3 "
        "--use_moe --num_experts 4 --moe_top_k 2 --enable_masking --num_workers 0 --num_genes 24"
    )
    called(f"test {checkpoint} --data_dir processed --split train --output s.json --no_report")
    for source, output in (("in/slice_0.h5ad", "o.h5ad"), ("processed", "p.h5ad")):
        called(
            f"sample {checkpoint} --input_data {source} --sample_mode expr_to_pos --num_steps 3 "
            f"--sampler ddim --output {output}"
        )
    torch.save({"expression": torch.randn(30, GENES)}, here / "cells.pt")
    called(f"sample {checkpoint} --input_data cells.pt --sample_mode expr_to_pos --num_steps 3")
    for mode, kind in (("encoder", "npz"), ("transformer", "pt"), ("all_layers", "h5")):
        called(
            f"extract {checkpoint} --data_dir processed --output e.{kind} --extract_mode {mode} "
            f"--format {kind} --max_samples 20 --batch_size 64"
        )
        assert (here / f"e.{kind}").is_file()
