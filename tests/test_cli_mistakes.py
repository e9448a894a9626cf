"""Mistakes on the command line: each gets one clear line and status 2, and leaves nothing."""

import pytest

from alphastomics.main import main

MISTAKES = {
    "": "no command given; choose one of: preprocess",
    "trian": "unknown command 'trian'; did you mean train?",
    "train --epoch 3": "train: unknown argument '--epoch'; did you mean --epochs?",
    "train extra": "unknown argument 'extra'",
    "train --lr fast": "--lr: expected a number above 0 or auto, got 'fast'",
    "train --lr -1": "--lr: expected a number above 0 or auto, got '-1'",
    "train --lr nan": "--lr: expected a number above 0 or auto, got 'nan'",
    "train --batch_size 1.5": "--batch_size: expected a whole number",
    "train --gate_type headwide": "did you mean headwise?",
    "train --gpus some": "--gpus: expected auto or a whole number",
    "train --use_moe --no_moe": "not allowed with",
    "train --fp16 --precision bf16": "not allowed with",
    "train --no_gated_attention --gate_type headwise": "linear attention has no gate",
    "train --moe_top_k 9": "moe_top_k (9) must be at most",
    "train --config none.yaml": "none.yaml: no such configuration file",
    "train --config .": "is a folder",
    "train --epochs": "expected one argument",
    "train --exp_name=": "--exp_name: expected a folder name",
    "preprocess --output_dir b": "required: --input_dir",
    "preprocess --input_dir= --output_dir b": "--input_dir: expected a path, got ''",
    "preprocess --input_dir a --output_dir b --train_ratio 1.2": "--train_ratio: expected a number",
    "preprocess --input_dir a --output_dir b --val_ratio 0.3": "must sum to at most 1",
    "simulate --output_dir a --genes 3": "--genes: expected a whole number of at least 20",
    "simulate --output_dir a --dims 4": "--dims: expected one of: 2, 3",
    "upload --data_dir a": "required: --repo_id",
    "report": "required: RUN",
    "report nowhere": "nowhere: not the folder of a run",
    "report nowhere --outpt a": "unknown argument '--outpt'; did you mean --output?",
    "upload --repo_id a/b": "give --data_dir (a processed folder) or --checkpoint (a model)",
    "upload --repo_id a/b --data_dir a --checkpoint b": "not allowed with",
    "train --seed -3": "--seed",
    "sample --checkpoint a --input_data b --reference c --landmarks d": "not allowed with",
    "sample --checkpoint a --input_data b --frame_scale": "--frame_scale: counts with",
    "sample --checkpoint a --num_cells 9 --product estimate": "is now --estimator mean",
    "sample --checkpoint a": "give --input_data, or --num_cells",
    "sample --checkpoint a --input_data b --num_cells 9": "not allowed with",
    "sample --checkpoint a --num_cells 1": "--num_cells: expected a whole number of at least 2",
    "sample --checkpoint a --input_data b --num_slices 2": "--num_slices: counts with --num_cells",
    "sample --checkpoint a --num_cells 9 --sample_mode pos_to_expr": "--num_cells: makes new",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gets_one_clear_line_and_status_2(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert MISTAKES[line] in captured.err
    assert list(tmp_path.iterdir()) == []
