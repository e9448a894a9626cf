"""Flags that look active and are not: each gets a word."""

from pathlib import Path

import pytest
import torch

from alphastomics.cli.commands import unused_by_train
from alphastomics.cli.parse import parse_arguments
from alphastomics.config import SamplingConfig
from alphastomics.generation.notices import sample_notices, score_notices
from alphastomics.main import main
from tests.diffusion_model.conftest import processed, run

__all__ = ["processed", "run"]

FILE = Path("cells.h5ad")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num_experts 8", "--num_experts: counts with --use_moe, which is off"),
        ("--moe_top_k 1", "--moe_top_k: counts with --use_moe"),
        ("--use_moe --num_experts 8 --moe_top_k 1", None),
        ("--expression_mask_ratio 0.1", "--expression_mask_ratio: counts with --enable_masking"),
        ("--enable_masking --position_mask_ratio 0.1", None),
        ("--buffer_size 100", "--buffer_size: counts with --streaming"),
        ("--streaming --buffer_size 100", None),
    ],
)
def test_a_flag_of_train_without_its_switch_gets_a_word(flags, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = unused_by_train(parse_arguments(["train", *flags.split()]))
    assert result == [] if words is None else words in result[0]


@pytest.mark.parametrize(
    ("given", "mode", "estimator", "words"),
    [
        ({"num_steps", "sampler"}, "expr_to_pos", "mean", "--num_steps, --sampler: the estim"),
        ({"num_steps", "sampler"}, "expr_to_pos", "sample", None),
        ({"num_steps", "sampler"}, "joint", "mean", None),
        ({"estimator"}, "joint", "sample", "--estimator: joint makes one sample"),
        ({"num_samples"}, "joint", "sample", "--num_samples: joint makes one sample"),
        ({"split"}, "expr_to_pos", "sample", "--split: counts with a processed folder"),
    ],
)
def test_a_flag_of_sample_that_does_nothing_gets_a_word(given, mode, estimator, words):
    result = sample_notices(given, mode, SamplingConfig(estimator=estimator), FILE)
    assert result == [] if words is None else words in result[0]


def test_new_tissue_of_counts_has_a_way_of_its_own():
    flags = {"num_steps", "sampler"}
    result = sample_notices(flags, "joint", SamplingConfig(), FILE, has_counts=True)
    assert "--num_steps, --sampler: new tissue of counts" in result[0]


def test_a_flag_of_test_that_does_nothing_gets_a_word(tmp_path):
    assert "its own cell types" in score_notices({"cell_type_key"}, tmp_path)[0]
    assert score_notices({"split"}, tmp_path) == []
    assert "--split" in score_notices({"split", "cell_type_key"}, FILE)[0]


def test_deterministic_reaches_sample_and_the_words_reach_the_console(
    processed, run, tmp_path, monkeypatch, capsys
):
    folder = run("small")
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    flags = ["--input_data", str(processed), "--sample_mode", "expr_to_pos", "--num_steps", "2"]
    output = ["--output", str(tmp_path / "placed.h5ad")]
    words = ["sample", "--checkpoint", str(folder.last), *flags, *output, "--deterministic"]
    assert main(words) == 0
    assert asked == [True]
    assert "--num_steps: the estimate is one network call" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["test", "report"])
def test_deterministic_reaches_the_other_commands_that_sample(command, monkeypatch):
    """Each seeds before it works: what comes after is cut off."""
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    words = {
        "test": ["--checkpoint", "none.ckpt", "--input_data", "none.h5ad"],
        "report": [str(Path(__file__).parent.parent), "--checkpoint", "none.ckpt"],
    }
    assert main([command, *words[command], "--deterministic"]) == 2
    assert asked == [True]


def test_the_dimensions_of_a_synthetic_tissue_can_be_given(tmp_path):
    for dims in (2, 3):
        flags = ["--cells", "30", "--slices", "1", "--genes", "20", "--dims", str(dims)]
        assert main(["simulate", "--output_dir", str(tmp_path / str(dims)), *flags]) == 0
    assert main(["simulate", "--output_dir", str(tmp_path / "4"), "--dims", "4"]) == 2


def test_help_says_what_steps_and_solver_count_for(capsys):
    with pytest.raises(SystemExit):
        main(["sample", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Network calls of a sample (joint, --estimator sample, and the std)" in said
