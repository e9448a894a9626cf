"""Flags that look active and are not: each gets a word."""

from pathlib import Path

import pytest
import torch

from alphastomics.cli.commands import unused_by_train
from alphastomics.cli.parse import parse_arguments
from alphastomics.config import PreprocessingConfig, SamplingConfig
from alphastomics.errors import InputError
from alphastomics.generation.notices import require_used_flags, sample_notices, score_notices
from alphastomics.main import main
from tests.diffusion_model.conftest import processed, run
from tests.vendor_folders import some_cells, write_cosmx, write_xenium

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


GIVEN = PreprocessingConfig(table="cells", pixel_size=0.5)


def test_a_flag_of_an_input_that_no_file_of_the_call_uses_is_refused(tmp_path, caplog):
    xenium = write_xenium(tmp_path / "xenium", some_cells())
    cosmx = write_cosmx(tmp_path / "cosmx", some_cells())
    (tmp_path / "processed").mkdir()
    for flag in ("table", "pixel_size"):
        for source in (None, tmp_path / "cells.pt", tmp_path / "processed", xenium):
            if source is not None and source.suffix == ".pt":
                source.touch()
            only = PreprocessingConfig(**{flag: getattr(GIVEN, flag)})
            with pytest.raises(InputError, match=f"--{flag}: .*leave it out"):
                require_used_flags({flag}, only, source)
    pixels = PreprocessingConfig(pixel_size=0.5)
    require_used_flags({"pixel_size"}, pixels, cosmx)
    require_used_flags({"num_steps"}, GIVEN, xenium)
    require_used_flags({"table"}, GIVEN, tmp_path / "missing.h5ad")  # who reads it says so
    assert caplog.text == ""
    require_used_flags({"pixel_size"}, pixels, xenium, [cosmx, None, tmp_path / "column"])
    assert "--pixel_size: not used for 1 of 2 inputs" in caplog.text
    (tmp_path / "known.h5ad").touch()
    require_used_flags({"pixel_size"}, pixels, cosmx, [tmp_path / "known.h5ad"])
    assert "--pixel_size: converts" in caplog.messages[-1]
    assert "known.h5ad, too, beside" in caplog.messages[-1]


@pytest.mark.parametrize("command", ["sample", "test", "extract", "report"])
def test_every_command_that_reads_cells_refuses_them(command, tmp_path, capsys):
    xenium = write_xenium(tmp_path / "xenium", some_cells())
    (tmp_path / "config.yaml").write_text("{}")
    run = [str(tmp_path)] if command == "report" else ["--checkpoint", "none.ckpt"]
    assert main([command, *run, "--input_data", str(xenium), "--table", "nope"]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert "(xenium) has no tables to choose from: leave it out" in said


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
