"""Flags with values that no flag expects, for every command."""

import pytest

from tests.faults.door import refused, require_no_accident

HUGE = "9" * 40
# {name}: a path of the tiny job.
REFUSED = [
    "preprocess --input_dir {slices} --output_dir out --z_spacing nan",
    "preprocess --input_dir {slices} --output_dir out --z_spacing -1e400",
    "preprocess --input_dir {slices} --output_dir out --z_spacing 0",
    "preprocess --input_dir {slices} --output_dir out --z_spacing 1e308",
    "stage1 --input_dir {slices} --output_dir out --gene_list_file {genes} --z_spacing 1e13",
    "preprocess --input_dir {slices} --output_dir out --train_ratio -0.1",
    "preprocess --input_dir {slices} --output_dir out --train_ratio nan",
    "preprocess --input_dir {slices} --output_dir out --max_shard_size 0",
    "preprocess --input_dir {slices} --output_dir out --max_cells_per_file -1",
    f"preprocess --input_dir {{slices}} --output_dir out --max_cells_per_file {HUGE}",
    "preprocess --input_dir {slices} --output_dir out --workers 0",
    "preprocess --input_dir {slices} --output_dir out --workers 1e3",
    "preprocess --input_dir {slices} --output_dir out --split_by gene",
    "preprocess --input_dir {slices} --output_dir out --storage paper",
    "preprocess --input_dir {slices} --output_dir out --position_key=",
    "preprocess --input_dir {slices} --output_dir out --position_key nowhere",
    "preprocess --input_dir {slices} --output_dir out --position_key ../obs",
    "preprocess --input_dir {slices} --output_dir out --cell_type_key nowhere",
    "preprocess --input_dir {slices} --output_dir out --position_is_3d",
    "preprocess --input_dir {slices} --output_dir out --seed -1",
    f"preprocess --input_dir {{slices}} --output_dir out --seed {HUGE}",
    "preprocess --input_dir {slices} --output_dir out --scheduler nowhere:1:2",
    "preprocess --input_dir {slices} --output_dir out --scheduler=",
    "preprocess --input_dir {slices} --output_dir {genes}",
    "preprocess --input_dir {slices} --output_dir {genes}/below",
    "preprocess --input_dir {slices} --output_dir /dev/null",
    "preprocess --input_dir {slices} --output_dir /proc/nowhere",
    "preprocess --input_dir {genes} --output_dir out",
    "preprocess --input_dir /dev/null --output_dir out",
    "preprocess --input_dir {slices} --output_dir " + "x" * 300,
    "stage1 --input_dir {slices} --output_dir out",
    "stage1 --input_dir {slices} --output_dir out --gene_list_file=",
    "stage1 --input_dir {slices} --output_dir {processed} --gene_list_file {genes}",
    "stage2 --input_dirs --output_dir out",
    "stage2 --input_dirs {stage1} {stage1} --output_dir out",
    "stage2 --input_dirs {slices} --output_dir out",
    "stage2 --input_dirs {stage1} nowhere --output_dir out",
    "stage2 --input_dirs {stage1} --output_dir out --train_ratio 2",
    "train --data_dir nowhere",
    "train --data_dir {slices}",
    "train --data_dir {genes}",
    "train --data_dir=",
    "train --data_dir {processed} --batch_size 100000",
    "train --data_dir {processed} --num_genes 7",
    "train --data_dir {processed} --num_workers -1",
    f"train --data_dir {{processed}} --epochs {HUGE}",
    "train --data_dir {processed} --lr inf",
    "train --data_dir {processed} --lr 1e-999",
    "train --data_dir {processed} --gpus -1",
    "train --data_dir {processed} --gpus 4097",
    "train --data_dir {processed} --precision 64",
    "train --data_dir {processed} --strategy magic",
    "train --data_dir {processed} --num_nodes 0",
    "train --data_dir {processed} --exp_name ../../escaped",
    "train --data_dir {processed} --exp_name /escaped",
    "train --data_dir {processed} --exp_name ..",
    "train --data_dir {processed} --exp_name " + "x" * 300,
    "train --data_dir {processed} --batch_size 32 --output_dir {genes}",
    "train --data_dir {processed} --batch_size 32 --output_dir /dev/null",
    "train --data_dir {processed} --batch_size 32 --resume nowhere.ckpt",
    "train --data_dir {processed} --batch_size 32 --resume=",
    "train --data_dir {processed} --expression_mask_ratio 1.5",
    "train --data_dir {processed} --use_moe --num_experts 0",
    "train --config {config} --output_dir {home}/outputs",
    "test --checkpoint {checkpoint} --data_dir nowhere",
    "test --checkpoint {checkpoint} --data_dir {processed} --split all",
    "test --checkpoint {checkpoint} --data_dir {processed} --num_steps 0",
    "test --checkpoint {checkpoint} --data_dir {processed} --num_steps 100000",
    "test --checkpoint {checkpoint} --data_dir {processed} --output nowhere/scores.json",
    "test --checkpoint {checkpoint} --data_dir {processed} --output {genes}",
    "test --checkpoint {checkpoint} --data_dir {processed} --output {slices} --overwrite",
    "test --checkpoint {checkpoint} --input_data {slice} --cell_type_key nowhere",
    "sample --checkpoint {checkpoint} --input_data {slice} --output x.csv",
    "sample --checkpoint {checkpoint} --input_data {slice} --output=",
    "sample --checkpoint {checkpoint} --input_data {slice} --output nowhere/x.h5ad",
    "sample --checkpoint {checkpoint} --input_data {slice} --output {slice}",
    "sample --checkpoint {checkpoint} --input_data {slice} --output .h5ad",
    "sample --checkpoint {checkpoint} --input_data {slice} --output ..",
    "sample --checkpoint {checkpoint} --input {slice} --output x.h5ad",
    "sample --checkpoint {checkpoint} --input_data {slice} --num_steps -3",
    "sample --checkpoint {checkpoint} --input_data {slice} --num_steps 10**9",
    "sample --checkpoint {checkpoint} --input_data {slice} --num_steps 1000000000",
    "sample --checkpoint {checkpoint} --input_data {slice} --num_steps 1001",
    "sample --checkpoint {checkpoint} --input_data {slice} --num_samples 0",
    "sample --checkpoint {checkpoint} --input_data {slice} --num_samples 1000000",
    "sample --checkpoint {checkpoint} --input_data {slice} --sampler euler",
    "sample --checkpoint {checkpoint} --input_data {slice} --sample_mode backwards",
    "sample --checkpoint {checkpoint} --input_data {genes}",
    "sample --checkpoint {checkpoint} --input_data {slices}",
    "sample --checkpoint {checkpoint} --num_cells 0 --output x.h5ad",
    "sample --checkpoint {checkpoint} --num_cells -7 --output x.h5ad",
    "sample --checkpoint {checkpoint} --num_cells 1e3 --output x.h5ad",
    f"sample --checkpoint {{checkpoint}} --num_cells {HUGE} --output x.h5ad",
    "sample --checkpoint {checkpoint} --num_cells 99999999999999 --output x.h5ad",
    "sample --checkpoint {checkpoint} --num_cells 5 --num_slices 0 --output x.h5ad",
    "sample --checkpoint {checkpoint} --num_cells 5 --num_slices 99999999999999 --output x.h5ad",
    "sample --checkpoint= --input_data {slice}",
    "extract --checkpoint {checkpoint} --data_dir {processed} --output x.csv",
    "extract --checkpoint {checkpoint} --data_dir {processed} --output {home}",
    "extract --checkpoint {checkpoint} --data_dir {processed} --output nowhere/x.npz",
    "extract --checkpoint {checkpoint} --data_dir {processed} --output x.npz --format h5",
    "extract --checkpoint {checkpoint} --data_dir {processed} --max_samples 0",
    "extract --checkpoint {checkpoint} --data_dir {processed} --max_samples -1",
    "extract --checkpoint {checkpoint} --data_dir {processed} --batch_size 0",
    "extract --checkpoint {checkpoint} --data_dir {processed} --extract_mode soul",
    "extract --checkpoint {checkpoint} --input_data {slice} --max_samples 3",
    "extract --checkpoint {checkpoint} --input_data {processed}",
    "extract --checkpoint {checkpoint} --input_data {slice} --data_dir {processed}",
    "report {run} --data_dir {processed} --output x.pdf",
    "report {run} --data_dir {processed} --output nowhere/x.html",
    "report {run} --data_dir {processed} --genes nowhere",
    "report {run} --data_dir {processed} --genes=",
    "report {run} --data_dir {processed} --split all",
    "report {slices}",
    "report {genes}",
    "report ''",
    "upload --data_dir {processed} --repo_id nonsense --token hf_secret",
    "upload --data_dir {processed} --repo_id a/b/c --token hf_secret",
    "upload --data_dir {processed} --repo_id ../b --token hf_secret",
    "upload --data_dir {processed} --repo_id a/b --token=",
    "upload --data_dir {processed} --repo_id a/b --token 'hf secret'",
    "upload --data_dir {processed} --repo_id a/b --token hf_secret --license 'My Own'",
    "upload --data_dir nowhere --repo_id a/b --token hf_secret",
    "upload --data_dir {slices} --repo_id a/b --token hf_secret",
    "simulate --output_dir out --cells 0",
    f"simulate --output_dir out --cells {HUGE}",
    "simulate --output_dir out --cells 99999999999",
    "simulate --output_dir out --slices -1",
    "simulate --output_dir out --cells 30 --genes 20 --slices 1000000000",
    "simulate --output_dir out --genes 999999999999",
    "simulate --output_dir out --panel_share 0",
    "simulate --output_dir out --panel_share nan",
    "simulate --output_dir {genes}",
    "simulate --output_dir {genes}/below",
    "simulate --output_dir=",
    "info --num_genes 0",
    "info --num_genes x",
    f"info --num_genes {HUGE}",
    "info --data_dir nowhere",
    "info --data_dir {slices}",
    "config --config x",
    "config extra",
    "demo --output_dir {genes}",
    "--unknown",
    "''",
    "train --data_dir a --data_dir",
]
HARMLESS = [
    "info --num_genes nowhere --num_genes 1",
    "info --num_genes 1",
    "info --num_genes 2000000",
    "info --data_dir {processed}",
    "config",
    "config --verbose",
    "--help",
    "--version",
    "train --help",
    "sample --checkpoint {checkpoint} --config {config} --num_cells 2 --output x.h5ad",
    "sample --checkpoint {export} --config {config} --num_cells 3 --num_slices 3 --output x.pt",
    "extract --checkpoint {checkpoint} --data_dir {processed} --max_samples 1 --output x.npz",
    "extract --checkpoint {checkpoint} --data_dir {processed} --max_samples 99999 --output x.h5ad",
    "preprocess --input_dir {slices} --output_dir a/b/c --max_cells_per_file 9 --max_shard_size 7",
    "preprocess --input_dir {slices} --output_dir o --z_spacing 1e9 --train_ratio 1 --val_ratio 0",
    "preprocess --input_dir {slices} --output_dir out --max_shard_size 999999999",
]


def words(line: str, tiny) -> list[str]:
    names = ("home", "slices", "slice", "genes", "config", "stage1", "processed", "run")
    places = {name: getattr(tiny, name) for name in (*names, "checkpoint", "export")}
    return [part.strip("'").format(**places) for part in split_words(line)]


def split_words(line: str) -> list[str]:
    """Split at spaces; a quoted part may hold some, or nothing."""
    parts, quoted = [], False
    for part in line.split(" "):
        if quoted:
            parts[-1] += f" {part}"
        else:
            parts.append(part)
        quoted = quoted ^ (part.count("'") == 1)
    return parts


def short(line: str) -> str:
    return line if len(line) < 110 else f"{line[:100]}..."


@pytest.mark.parametrize("line", REFUSED, ids=short)
def test_a_flag_that_cannot_be_meant_is_refused(line, door, tiny):
    outcome = door(*words(line, tiny))
    refused(outcome)
    assert "hf_secret" not in outcome.err


@pytest.mark.parametrize("line", HARMLESS, ids=short)
def test_a_flag_that_looks_odd_and_is_fine(line, door, tiny):
    try:
        outcome = door(*words(line, tiny))
    except SystemExit as leave:  # argparse leaves by itself after its help
        assert leave.code == 0
        return
    require_no_accident(outcome)
    assert outcome.status == 0, outcome.err[-2000:]
