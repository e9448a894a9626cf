"""The command: from a run's folder to a page, and what it says when it cannot."""

import json
import re
from pathlib import Path

import anndata
import numpy as np
import pytest
import torch

from alphastomics.cli.parse import parse_arguments
from alphastomics.config import Config, PreprocessingConfig, SimulationConfig
from alphastomics.diffusion_model.run_folder import RunFolder, best_checkpoint
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.errors import InputError
from alphastomics.evaluation.position import rmsd
from alphastomics.generation.cells import read_processed
from alphastomics.generation.commands import load_for_use
from alphastomics.generation.evaluate import evaluate
from alphastomics.generation.generate import generate
from alphastomics.main import main
from alphastomics.preprocessing.commands import preprocess
from alphastomics.report.collect import (
    brought_onto,
    denoising_path,
    nearest_rows,
    predicted_positions,
)
from alphastomics.report.commands import page_beside, read_scores, run_of
from alphastomics.report.curves import read_curves
from alphastomics.report.diagnostics import look_inside
from alphastomics.simulate import write_tissue
from tests.diffusion_model.conftest import tiny_config

QUICK = ("--num_steps", "3", "--num_samples", "2")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A processed folder, a joint run with experts and a run for positions alone."""
    folder = tmp_path_factory.mktemp("report")
    write_tissue(SimulationConfig(cells=90, slices=2, genes=24), 5, folder / "h5", overwrite=False)
    preprocess(
        PreprocessingConfig(cell_type_key="cell_type", train_ratio=0.5, val_ratio=0.1),
        input_dir=folder / "h5",
        output_dir=folder / "processed",
        gene_list_file=None,
        seed=1,
        overwrite=False,
        scheduler=None,
    )
    layers = {"joint": {"use_moe": True}, "expr_to_pos": {"use_gated_attention": False}}
    for mode, layer in layers.items():
        training = {"mode": mode, "batch_size": 45, "max_epochs": 1}
        sections = {"logging": {"exp_name": mode}, "TransformerLayer_setting": layer}
        train(
            tiny_config(folder / "processed", folder, training=training, **sections), TrainRequest()
        )
    return folder


def data_of(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    result = re.search(r'<script id="report-data" type="application/json">(.*?)</script>', text)
    assert result
    return json.loads(result[1])


def refusal(arguments: list, capsys) -> str:
    assert main([str(part) for part in arguments]) == 2
    return capsys.readouterr().err


def test_a_run_becomes_a_page_beside_its_checkpoints_with_every_part(home: Path, capsys):
    assert main(["report", str(home / "joint"), *QUICK]) == 0
    page = home / "joint/report.html"
    assert capsys.readouterr().out.strip() == str(page)
    data = data_of(page)
    assert data["title"] == "joint"
    assert data["missing"] == {}
    for part in (
        "predicted_position",
        "agreement",
        "new",
        "path",
        "inside",
        "scores",
        "curves",
        "types",
    ):
        assert data[part], part
    assert data["inside"]["expert_use"] is not None
    assert data["predicted_position"]["calibration"] is not None
    assert {table["mode"] for table in data["scores"]} >= {"expr_to_pos", "pos_to_expr"}
    assert len(data["path"]["time"]) == 3


def test_a_page_says_what_a_specialised_checkpoint_cannot_show(home: Path, tmp_path: Path):
    run, page = str(home / "expr_to_pos"), tmp_path / "a.html"
    arguments = ["--num_steps", "2", "--num_samples", "1", "--output", str(page)]
    assert main(["report", run, *arguments]) == 0
    data = data_of(page)
    assert data["new"] is data["agreement"] is None
    assert "trained for expr_to_pos alone" in data["missing"]["predicted"]
    assert "one sample only" in data["missing"]["std"]
    assert data["predicted_position"]["std"] is None
    assert data["inside"]["expert_use"] is data["inside"]["gate"] is None


def test_a_file_without_cell_types_is_reported_on_with_given_scores(home: Path, tmp_path: Path):
    scores = tmp_path / "scores.json"
    scores.write_text(json.dumps({"expr_to_pos": {"me": {"procrustes": 0.25}}, "output": "x"}))
    page = tmp_path / "page.html"
    source = home / "h5/slice_0.h5ad"
    given = ["--input_data", source, "--scores", scores, "--output", page, *QUICK]
    assert main(["report", *map(str, [home / "joint", *given])]) == 0
    data = data_of(page)
    assert data["types_are"] == "Cluster"
    assert data["unit"] == "µm"
    assert {"region", "cell_type"} & {column["name"] for column in data["columns"]}
    assert data["scores"][0]["values"] == {"me": {"procrustes": 0.25}}


def test_test_writes_the_report_beside_its_scores_unless_asked_not_to(home: Path, tmp_path, capsys):
    checkpoint = best_checkpoint(RunFolder(home / "joint"))
    arguments = ["test", "--checkpoint", checkpoint, "--data_dir", home / "processed", *QUICK]

    def test(name: str, *more: str) -> None:
        assert main([*map(str, arguments), "--output", str(tmp_path / name), *more]) == 0

    test("one.json", "--no_report")
    assert not (tmp_path / "one.html").exists()
    capsys.readouterr()
    test("two.json")
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if re.search(r"(network calls|steps) in", line)
    ]
    progress = [re.sub(r"^[\d:]+ |: .*", "", line) for line in lines]
    # The page shows the cells that were scored: nothing is generated twice.
    assert progress == ["score expr_to_pos", "score pos_to_expr", "score joint"]
    data = data_of(tmp_path / "two.html")
    assert data["scores"][0]["values"]
    assert data["curves"]


def test_the_page_of_a_test_is_named_after_its_scores_and_never_replaces_them():
    assert page_beside(Path("a/scores.json")) == Path("a/scores.html")
    assert page_beside(Path("a/scores.html")) == Path("a/scores.report.html")


def test_mistakes_end_in_one_line(home: Path, tmp_path: Path, capsys):
    run, page = home / "joint", tmp_path / "page.html"
    page.write_text("mine")
    assert "exists already" in refusal(["report", run, "--output", page], capsys)
    assert page.read_text() == "mine"
    assert "ends in .html" in refusal(["report", run, "--output", tmp_path / "a.pdf"], capsys)
    assert "not the folder of a run" in refusal(["report", tmp_path], capsys)
    (tmp_path / "config.yaml").write_text("")
    assert "not the folder of a run" in refusal(["report", tmp_path], capsys)
    new = ["--output", tmp_path / "new.html"]
    assert "holds no scores" in refusal(
        ["report", run, *new, "--scores", run / "report.json"], capsys
    )
    assert "no such file" in refusal(
        ["report", run, *new, "--input_data", tmp_path / "none.h5ad"], capsys
    )
    wrong = ["report", run, *new, *QUICK, "--genes", "NotAGene", "--overwrite"]
    assert "'NotAGene' is none of the checkpoint's 24 genes" in refusal(wrong, capsys)
    assert not (tmp_path / "new.html").exists()


def test_dissociated_cells_cannot_be_reported_on(home: Path, tmp_path: Path, capsys):
    data = anndata.read_h5ad(home / "h5/slice_0.h5ad")
    del data.obsm["spatial"]
    data.write_h5ad(tmp_path / "loose.h5ad")
    arguments = ["report", home / "joint", "--input_data", tmp_path / "loose.h5ad"]
    arguments += ["--output", tmp_path / "page.html"]
    assert "no positions to score against" in refusal(arguments, capsys)


def test_a_run_without_a_finished_training_is_reported_on_by_its_last_checkpoint(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    folder.mark("running")
    with pytest.raises(InputError, match="has no checkpoint yet"):
        best_checkpoint(folder)
    folder.last.touch()
    assert best_checkpoint(folder) == folder.last


def test_a_run_that_was_moved_still_knows_its_best_checkpoint(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    folder.mark("finished")
    (folder.checkpoints / "epoch1.ckpt").touch()
    (folder.path / "report.json").write_text('{"best_checkpoint": "/old/checkpoints/epoch1.ckpt"}')
    assert best_checkpoint(folder) == folder.checkpoints / "epoch1.ckpt"


def test_a_checkpoint_and_exported_weights_know_their_run_unless_they_were_moved(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.csv").write_text("step,epoch,name,value\n10,0,val/loss,0.5\n")
    for inside in ("checkpoints/last.ckpt", "export"):
        result = run_of(tmp_path / "run" / inside)
        assert result is not None
        assert result.path.name == "run"
        assert read_curves(result.metrics)["val/loss"].value.tolist() == [0.5]
    assert run_of(tmp_path / "elsewhere/last.ckpt") is None


def test_scores_that_are_none_are_refused(tmp_path: Path):
    path = tmp_path / "scores.json"
    for content in ("{", "[]", '{"expr_to_pos": 3}'):
        path.write_text(content)
        with pytest.raises(InputError, match=r"scores\.json"):
            read_scores(path)


def test_a_report_takes_the_settings_of_its_run_and_flags_override_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: {global_seed: 1}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("sampling: {num_steps: 7, num_samples: 3}")
    call = parse_arguments(["report", "run", "--num_samples", "2", "--genes", "A", "B"])
    assert call.config.sampling.num_steps == 7
    assert call.config.sampling.num_samples == 2
    assert call.config.seed == Config().seed
    assert (call.arguments.run.name, call.arguments.genes) == ("run", ["A", "B"])


def test_modes_choose_what_is_scored_and_shown(home: Path, tmp_path: Path, capsys):
    checkpoint = best_checkpoint(RunFolder(home / "joint"))
    arguments = ["test", "--checkpoint", checkpoint, "--data_dir", home / "processed", *QUICK]
    arguments += ["--output", tmp_path / "some.json", "--modes"]
    assert main([*map(str, arguments), "joint", "expr_to_pos"]) == 0
    assert list(json.loads((tmp_path / "some.json").read_text())) == ["expr_to_pos", "joint"]
    data = data_of(tmp_path / "some.html")
    assert data["new"]
    assert data["predicted_position"]
    assert "asked for alone (--modes)" in data["missing"]["predicted"]
    assert "joint or expr_to_pos or pos_to_expr" in refusal([*arguments, "both"], capsys)
    arguments[2] = best_checkpoint(RunFolder(home / "expr_to_pos"))
    words = refusal([*arguments, "joint", "--overwrite"], capsys)
    assert "--modes joint: the checkpoint was trained for expr_to_pos alone" in words


def test_what_was_scored_is_what_would_be_generated_for_the_page(loaded):
    module, cells = loaded
    settings = Config().sampling.model_copy(update={"num_steps": 3, "num_samples": 2})
    for estimator in ("mean", "sample"):
        settings = settings.model_copy(update={"estimator": estimator})
        kept: dict = {}
        evaluate(module, cells, None, settings, 1, kept=kept)
        assert set(kept) == {"expr_to_pos", "pos_to_expr", "joint"}
        for mode, scored in kept.items():
            again = generate(module, cells, mode, settings, 1)
            np.testing.assert_array_equal(scored.position_std, again.position_std)
            if mode != "pos_to_expr":
                np.testing.assert_array_equal(scored.position, again.position)
            # Scored cells are centred: given positions differ in the last digits.
            np.testing.assert_allclose(scored.expression, again.expression, atol=1e-4)


@pytest.fixture(scope="module")
def loaded(home: Path):
    module, genes = load_for_use(best_checkpoint(RunFolder(home / "joint")))
    return module, read_processed(home / "processed", genes, "test")


def positions_for(loaded, settings):
    module, cells = loaded
    generated = generate(module, cells, "expr_to_pos", settings, 1)
    return predicted_positions(generated, cells, settings)


def test_errors_are_those_of_the_metrics_and_positions_lie_in_the_frame_of_the_truth(loaded):
    cells = loaded[1]
    settings = Config().sampling.model_copy(update={"num_steps": 3, "num_samples": 2})
    predicted = positions_for(loaded, settings)
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        result = np.sqrt(np.mean(np.square(predicted.error[rows], dtype=np.float64)))
        plane = predicted.position[rows, :2], cells.position[rows, :2]
        assert result == pytest.approx(rmsd(*plane, reflection=True), rel=1e-4)
        np.testing.assert_allclose(plane[0].mean(0), plane[1].mean(0), rtol=1e-3, atol=1e-2)
    assert (predicted.position[:, 2] == cells.position[:, 2]).all()
    assert (predicted.std > 0).all()


def test_the_path_begins_with_noise_and_ends_with_what_the_sampler_returns(loaded):
    module, cells = loaded
    settings = Config().sampling.model_copy(update={"num_steps": 5, "num_samples": 1})
    path = denoising_path(module, cells, 0, settings, 1)
    assert path.noisy.shape == path.clean.shape == (5, len(cells.rows_of(0)), 3)
    assert path.time.tolist() == [1, 0.8, 0.6, 0.4, 0.2]
    centred = path.noisy[0] - cells.position[path.rows].mean(0)
    # Pure noise has the model's unit of length in every direction.
    assert centred.std() == pytest.approx(float(module.position_scale), rel=0.2)
    sampled = settings.model_copy(update={"estimator": "sample"})
    ended = positions_for(loaded, sampled).position[path.rows]
    true = cells.position[path.rows]
    rotated = rmsd(path.clean[-1].astype(float), true.astype(float), reflection=True)
    drawn = rmsd(ended[:, :2].astype(float), true[:, :2].astype(float), reflection=True)
    # The same draw, once as a body and once laid into the plane.
    assert rotated == pytest.approx(drawn, rel=0.5)


def test_what_is_seen_inside_are_shares(loaded):
    module, cells = loaded
    inside = look_inside(module, cells, cells.rows_of(0), "joint", 1)
    np.testing.assert_allclose(inside.expert_use.sum(2), 1, rtol=1e-5)
    np.testing.assert_allclose(inside.gate.sum(2), 1, rtol=1e-5)
    np.testing.assert_allclose(inside.attention.mean(1), 1, rtol=1e-4)


def test_nearest_rows_and_the_rotation_onto_them_undo_a_permutation_and_a_rotation():
    random = np.random.default_rng(0)
    known = random.normal(size=(50, 8)).astype(np.float32)
    order = random.permutation(50)
    assert nearest_rows(known[order], known).tolist() == order.tolist()
    true = random.normal(size=(50, 2)).astype(np.float32) * 10 + 100
    turn = torch.linalg.qr(torch.from_numpy(random.normal(size=(2, 2))))[0].numpy()
    moved = ((true[order] - 3) @ turn).astype(np.float32)
    np.testing.assert_allclose(brought_onto(moved, true[order], true), true[order], atol=1e-3)


def test_anchors_are_given_and_all_others_are_scored_and_shown(home: Path, tmp_path: Path):
    cells = anndata.read_h5ad(home / "h5/slice_1.h5ad")
    cells.obs["known"] = np.isin(np.arange(90), np.random.default_rng(0).permutation(90)[:40])
    cells.write_h5ad(tmp_path / "cells.h5ad")
    checkpoint = best_checkpoint(RunFolder(home / "joint"))
    common = [
        *("--checkpoint", checkpoint, "--input_data", tmp_path / "cells.h5ad", *QUICK),
        *("--modes", "expr_to_pos", "pos_to_expr", "--data_dir", home / "processed"),
    ]

    def test(name: str, *more: str) -> tuple[dict, dict]:
        target = tmp_path / f"{name}.json"
        assert main([str(part) for part in ["test", *common, "--output", target, *more]]) == 0
        return json.loads(target.read_text()), data_of(tmp_path / f"{name}.html")

    scores, page = test("anchors", "--anchors", "known", "--estimator", "assigned")
    placing = scores["expr_to_pos"]
    ours, assigned, alone = (
        placing[name]
        for name in ("alphastomics", "alphastomics, assigned", "alphastomics without anchors")
    )
    # Where 40 of 90 cells are known, an untrained model is not worth much beside them.
    assert ours["spearman_mean"] > alone["spearman_mean"]
    assert {"outline_overlap", "spacing_distance", "interval_coverage"} <= set(assigned)
    assert scores["pos_to_expr"]["alphastomics"]["interval_coverage_expected"] == 0.9
    shown = page["predicted_position"]
    assert shown["assigned"]
    assert shown["anchors"]
    assert shown["radius"]["by"] == "anchors"
    assert 0.6 <= shown["radius"]["held"] <= 1
    assert ["Anchors", "40 of 90 cells: not scored"] in page["facts"]
    assert page["held"][0] == 0.9

    section = anndata.read_h5ad(home / "h5/slice_0.h5ad")
    section.obs_names = [f"other_{name}" for name in section.obs_names]
    section.obs["slice_id"] = "another"
    section.write_h5ad(tmp_path / "section.h5ad")
    scores, page = test("section", "--anchors", str(tmp_path / "section.h5ad"))
    assert set(placing) == set(scores["expr_to_pos"])
    shown = page["predicted_position"]
    assert shown["anchors"] is None
    assert shown["radius"]["by_section"]
    assert not shown["assigned"]


def test_anchors_that_leave_too_few_cells_to_score_are_refused(home, tmp_path, capsys):
    cells = anndata.read_h5ad(home / "h5/slice_1.h5ad")
    cells.obs["known"] = np.arange(90) < 85
    cells.write_h5ad(tmp_path / "cells.h5ad")
    arguments = ["test", "--checkpoint", best_checkpoint(RunFolder(home / "joint"))]
    arguments += ["--input_data", tmp_path / "cells.h5ad", "--anchors", "known"]
    words = refusal([*arguments, "--output", tmp_path / "scores.json"], capsys)
    assert "has 5 cell(s) that are no anchors" in words
    arguments = [*arguments[:-2], "--estimator", "assigned"]
    words = refusal([*arguments, "--output", tmp_path / "scores.json"], capsys)
    assert "--estimator assigned: puts cells onto the positions of a section" in words
