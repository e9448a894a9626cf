"""What a notebook shows: one traceback in its own words, and tables."""

import logging
import os
import traceback

import pandas as pd
import pytest
import torch

import alphastomics
from alphastomics import AlphaSTomics
from alphastomics.api.notebook import in_python, log_shown, score_frame
from alphastomics.api.settings import updated
from alphastomics.api.setup import units_known
from alphastomics.config import Config
from alphastomics.errors import InputError
from alphastomics.utils.metrics import position_scores
from tests.vendor_folders import some_cells, write_xenium


@pytest.mark.parametrize(
    ("said", "spoken"),
    [
        ("training.batch_size (--batch_size): too many", "training.batch_size (batch_size=): too"),
        ("go on with --resume last, or --overwrite", "go on with resume=True, or overwrite=True"),
        ("a higher learning rate (--lr 0.001)", "a higher learning rate (lr=0.001)"),
        ("raise --train_ratio", "raise train_ratio="),
        ("give --skip-log-normalize if", "give log_normalize=False if"),
        ("preprocess with --common_frame", "preprocess with common_frame=True"),
        ("--set data.preprocessing.position_key=KEY", "setup_anndata(adata, position_key=…)"),
        ("a -- b, x--y", "a -- b, x--y"),
    ],
)
def test_hints_name_keywords(said, spoken):
    assert in_python(said).startswith(spoken) or "x--y" in said


def test_a_mistake_is_one_error_with_one_traceback(slices):
    model = AlphaSTomics(slices, batch_size=10**6)
    with pytest.raises(InputError) as caught:
        model.train(max_epochs=1)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("Traceback") == 1
    assert "--" not in str(caught.value)
    assert "(batch_size=)" in str(caught.value)


def test_hints_in_the_log_name_keywords_too(slices, caplog):
    settings = {"model": {"d_model": 16, "n_heads": 2, "n_layers": 1}}
    for data in slices:
        data.X = data.X * 1.5
    with caplog.at_level(logging.WARNING):
        model = AlphaSTomics(slices, settings, batch_size=32)
        model.train(max_epochs=1)
    assert "if that was done before, give log_normalize=False" in caplog.text
    assert "--" not in caplog.text


def test_cells_without_positions_are_not_scored(model, slices):
    del slices[1].obsm["spatial"]
    with pytest.raises(InputError, match=r"no positions to score against; .* setup_anndata\(adata"):
        model.evaluate(slices[1])


def test_training_says_whose_coordinates_are_taken_as_micrometres(slices, caplog):
    settings = {"model": {"d_model": 16, "n_heads": 2, "n_layers": 1}}
    with caplog.at_level(logging.INFO):
        AlphaSTomics(slices, settings, batch_size=32).train(max_epochs=1)
    said = [line for line in caplog.messages if "as stored, as µm; multiply" in line]
    assert [line.partition(" are taken")[0] for line in said] == [
        "coordinates of adata[0], adata[1]"
    ]


def test_the_unit_of_converted_files_and_of_instruments_is_known(slices, slice_files, tmp_path):
    stored, run = slice_files / "slice_0.h5ad", write_xenium(tmp_path / "run", some_cells(60, 8))
    given = {"a": slices[0], "b": stored, "c": run}
    assert units_known(given, Config()) == {"c"}
    assert units_known({"b": str(stored)}, updated(None, {"pixel_size": 0.5})) == {"b"}


def test_scores_are_a_table_that_reads_like_nested_dicts(model, slices):
    scores = model.evaluate(slices[1])
    assert isinstance(scores, pd.DataFrame)
    assert "alphastomics" in scores["expr_to_pos"].columns
    kept = model._model.record["scores"]
    assert scores["expr_to_pos"]["alphastomics"]["spearman_mean"] == pytest.approx(
        kept["expr_to_pos"]["alphastomics"]["spearman_mean"]
    )
    assert list(score_frame({}).columns) == []


def test_a_loaded_run_has_its_history(validated, tmp_path):
    loaded = AlphaSTomics.load(tmp_path / "kept" / "alphastomics")
    assert len(loaded.history) > 0
    assert set(loaded.history["name"].str.split("/").str[0]) <= {"train", "val"}


def test_a_saved_model_keeps_its_history(validated, tmp_path):
    again = AlphaSTomics.load(validated.save(tmp_path / "saved"))
    assert len(again.history) > 0
    pd.testing.assert_frame_equal(again.history, validated.history)


def test_positions_can_be_scored_without_labels():
    true = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    assert position_scores(true, true)["spearman_mean"] == pytest.approx(1)


@pytest.fixture
def validated(slices, tmp_path):
    """A model of a short run that kept cells for validation: their loss is logged."""
    model = AlphaSTomics(
        slices, {"model": {"d_model": 16, "n_heads": 2, "n_layers": 1}},
        folder=tmp_path / "kept", batch_size=32, train_ratio=0.8,
    )  # fmt: skip
    return model.train(max_epochs=1)


def test_what_is_logged_is_shown_unless_the_user_configured_logging(monkeypatch, capsys):
    logger = logging.getLogger("alphastomics.fit")
    monkeypatch.setattr(logging.root, "handlers", [])
    with log_shown():
        logger.info("the plan")
    assert capsys.readouterr().err == "the plan\n"
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()])
    with log_shown():
        logger.info("the plan")
    assert capsys.readouterr().err == ""


def test_threads_wait_briefly_in_a_notebook_too(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    alphastomics.__getattr__("AlphaSTomics")
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("PASSIVE", "1000")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    alphastomics.__getattr__("AlphaSTomics")
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
