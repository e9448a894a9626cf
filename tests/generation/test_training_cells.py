"""`test --input_data`: baselines are fitted to the cells that the model was trained on."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from alphastomics.attn_model.neighbourhood import smoothed_set
from alphastomics.generation import baselines
from alphastomics.generation.baselines import SMOOTHING, smoothed_within_slices
from alphastomics.generation.cells import read_processed
from alphastomics.generation.commands import load_for_use
from alphastomics.generation.evaluate import warn_if_trained_on
from alphastomics.generation.training_cells import training_cells
from alphastomics.main import main
from tests.generation.conftest import checkpoint

FITTED = {"ridge", "expression kNN", "ExtraTrees", "ExtraTrees, sqrt", "ExtraTrees, smoothed"}
MISSING = "the training cells were not found"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A project as a user has it: slices, one of them kept apart, and a run with relative paths."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in (
            "simulate --output_dir slices --cells 60 --slices 3 --genes 24",
            "preprocess --input_dir slices --output_dir processed --cell_type_key cell_type",
            "train --data_dir processed --exp_name mine --epochs 1 --batch_size 64 --set_size 32 "
            "--d_model 16 --n_heads 2 --n_layers 1",
        ):
            assert main(line.split()) == 0, line
    return folder


def scores(folder: Path, *flags: object) -> dict[str, dict[str, dict[str, float]]]:
    """Score the kept slice by the command line, from the working folder."""
    words = [
        "--checkpoint",
        folder / "outputs/mine",
        "--input_data",
        folder / "slices/slice_2.h5ad",
    ]
    words += ["--num_steps", 2, "--no_report", "--overwrite", "--output", folder / "scores.json"]
    assert main(["test", *map(str, [*words, *flags])]) == 0
    return dict(json.loads((folder / "scores.json").read_text()))


def test_a_file_is_scored_beside_baselines_of_the_training_cells(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    result = scores(project)
    assert set(result["expr_to_pos"]) >= FITTED
    assert "spatial k-NN mean" in result["pos_to_expr"]  # its name is that of a training slice
    assert "real, other slice" in result["joint"]
    assert MISSING not in capsys.readouterr().err


def test_the_training_cells_are_found_from_any_working_folder(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert set(scores(project)["expr_to_pos"]) >= FITTED


def test_cells_that_were_moved_are_missed_in_words_and_found_by_data_dir(
    project, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    alone = tmp_path / "alone"
    shutil.copytree(project, alone)
    shutil.move(alone / "processed", tmp_path / "moved")
    result = scores(alone)
    assert FITTED.isdisjoint(result["expr_to_pos"])
    said = capsys.readouterr().err
    assert MISSING in said
    assert "with --data_dir" in said
    assert set(scores(alone, "--data_dir", tmp_path / "moved")["expr_to_pos"]) >= FITTED


def test_a_report_of_a_file_has_them_too(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--input_data", project / "slices/slice_2.h5ad", "--num_steps", 2, "--num_samples", 2]
    page = tmp_path / "page.html"
    assert main(["report", *map(str, [project / "outputs/mine", *words, "--output", page])]) == 0
    assert "ExtraTrees, smoothed" in page.read_text(encoding="utf-8")


def test_other_cells_are_never_taken_for_those_of_the_training(workspace: Path, project: Path):
    module, genes = load_for_use(checkpoint(workspace))
    module.config = module.config.model_copy(
        update={"data": module.config.data.model_copy(update={"processed_data_dir": "nowhere"})}
    )
    assert training_cells(module, genes, [project / "processed"]) is None
    assert training_cells(module, genes, [workspace / "processed"]) is not None


def test_smoothed_expression_of_some_cells_is_that_of_whole_slices(workspace: Path):
    _, genes = load_for_use(checkpoint(workspace))
    cells = read_processed(workspace / "processed", genes, "train")
    chosen = np.arange(1, len(cells.slice_id), 3)
    result = smoothed_within_slices(cells, chosen)
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        whole = smoothed_set(torch.from_numpy(cells.expression[rows]), **SMOOTHING).numpy()
        here = np.isin(chosen, rows)
        np.testing.assert_array_equal(result[here], whole[np.isin(rows, chosen)])


def test_of_very_many_cells_trees_take_fewer_and_it_is_said(workspace: Path, monkeypatch, caplog):
    caplog.set_level("INFO")
    _, genes = load_for_use(checkpoint(workspace))
    cells = read_processed(workspace / "processed", genes, "train")
    monkeypatch.setattr(baselines, "REGRESSION_CELLS", 50)
    used = {}
    real = baselines.regressed_positions

    def counted(expression, known, *rest, regressor, seed):
        used[regressor] = len(known)
        return real(expression, known, *rest, regressor=regressor, seed=seed)

    monkeypatch.setattr(baselines, "regressed_positions", counted)
    baselines.position_baselines(cells, cells, 0, tree_cells=30)
    few = {"trees": 30, "smoothed trees": 30}
    assert used == few | {"ridge": 50, "knn": 50, "sqrt trees": 50}
    assert f"of {len(cells.slice_id)} training cells ExtraTrees takes 30 at random" in caplog.text


def test_a_slice_that_was_trained_on_is_pointed_out_before_it_is_scored(workspace: Path, caplog):
    _, genes = load_for_use(checkpoint(workspace))
    cells = read_processed(workspace / "processed", genes, "train")
    warn_if_trained_on(cells, replace(cells, position=cells.position + 1))
    assert caplog.text == ""
    warn_if_trained_on(cells, cells)
    for name in cells.slice_names:
        assert f"slice {name}: 100 % of its cells were trained on" in caplog.text
