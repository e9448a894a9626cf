"""Generating with a trained model: inputs read as in training, outputs where they are promised."""

import json
from pathlib import Path

import anndata
import numpy as np
import pytest
import torch

from alphastomics.config import Config
from alphastomics.errors import InputError
from alphastomics.generation.cells import Blank, blank_cells, read_processed, read_query
from alphastomics.generation.commands import load_for_use, sample
from alphastomics.generation.commands import test as score
from alphastomics.generation.estimators import mean_and_sample
from alphastomics.generation.evaluate_joint import joint_scores
from alphastomics.generation.generate import (
    Generated,
    RunningMoments,
    as_tissue,
    generate,
    plane_of,
)
from alphastomics.main import main
from tests.generation.conftest import QUICK, SETTINGS, checkpoint


def run_sample(
    workspace: Path, source: Path, output: Path | None, mode: str = "expr_to_pos", **options
):
    config = SETTINGS.model_copy(update={"sampling": QUICK.model_copy(update={"mode": mode})})
    given = {"checkpoint": checkpoint(workspace), "split": "test", "overwrite": False, **options}
    return sample(config, input_data=source, output=output, **given)


def test_a_file_is_read_as_preprocessing_reads_it(workspace: Path):
    module, genes = load_for_use(checkpoint(workspace))
    assert module.normalization is not None
    parts = [
        read_processed(workspace / "processed", genes, s) for s in ("train", "validation", "test")
    ]
    known = {
        tuple(position): values
        for part in parts
        for position, values in zip(part.position.tolist(), part.expression, strict=True)
    }
    cells = read_query(workspace / "slices/slice_0.h5ad", genes, module.normalization, SETTINGS)
    for position, values in zip(cells.position.tolist(), cells.expression, strict=True):
        np.testing.assert_allclose(values, known[tuple(position)], atol=1e-5)
    assert cells.dims == 2
    assert not cells.measured.all()
    assert (cells.expression[:, ~cells.measured[0]] == 0).all()


def test_dissociated_cells_get_positions_with_their_std(workspace: Path, tmp_path: Path):
    source = tmp_path / "dissociated.h5ad"
    data = anndata.read_h5ad(workspace / "slices/slice_1.h5ad")
    del data.obsm["spatial"]
    data.write_h5ad(source)
    summary = run_sample(workspace, source, None)
    generated = anndata.read_h5ad(summary["output"])
    assert summary["output"] == str(tmp_path / "dissociated_generated.h5ad")
    assert list(generated.obs_names) == list(data.obs_names)
    assert generated.obsm["spatial_pred"].shape == (90, 2)
    assert np.isfinite(generated.obsm["spatial_pred"]).all()
    assert (generated.obsm["spatial_std"] > 0).all()
    np.testing.assert_allclose(generated.obsm["spatial_pred"].mean(0), 0, atol=1e-2)
    assert (generated.X != data.X).nnz == 0


def test_expression_at_positions_becomes_a_layer_of_the_files_genes(
    workspace: Path, tmp_path: Path
):
    source, target = workspace / "slices/slice_0.h5ad", tmp_path / "out.h5ad"
    run_sample(workspace, source, target, mode="pos_to_expr")
    generated = anndata.read_h5ad(target)
    assert generated.layers["generated"].shape == generated.shape
    assert np.isfinite(generated.layers["generated"]).all()
    assert "spatial_pred" not in generated.obsm


def test_a_processed_folder_and_tensors_are_inputs_too(workspace: Path, tmp_path: Path):
    generated = anndata.read_h5ad(
        run_sample(workspace, workspace / "processed", tmp_path / "a.h5ad", mode="joint")["output"]
    )
    assert {"spatial_pred", "spatial"} <= set(generated.obsm)
    assert "generated" in generated.layers
    _, genes = load_for_use(checkpoint(workspace))
    torch.save({"expression": torch.randn(30, len(genes))}, tmp_path / "in.pt")
    summary = run_sample(workspace, tmp_path / "in.pt", None)
    content = torch.load(summary["output"], weights_only=True)
    assert content["positions"].shape == (30, 2)


def test_cells_of_a_processed_folder_keep_their_names(workspace: Path, tmp_path: Path):
    generated = anndata.read_h5ad(
        run_sample(workspace, workspace / "processed", tmp_path / "a.h5ad", mode="expr_to_pos")[
            "output"
        ]
    )
    assert generated.obs_names.is_unique
    sources = {path.stem: anndata.read_h5ad(path) for path in (workspace / "slices").glob("*.h5ad")}
    for name, where in zip(generated.obs_names, generated.obs["slice_id"], strict=True):
        assert name.removeprefix(f"{where}:") in sources[where].obs_names


def test_the_std_of_positions_says_that_it_is_not_calibrated(
    workspace: Path, tmp_path: Path, caplog
):
    source = next((workspace / "slices").glob("*.h5ad"))
    generated = anndata.read_h5ad(run_sample(workspace, source, tmp_path / "a.h5ad")["output"])
    assert not generated.uns["alphastomics"]["spatial_std_calibrated"]
    assert "spatial_std is not calibrated" in generated.uns["alphastomics"]["spatial_std_note"]
    assert "spatial_std is not calibrated" in caplog.text


def test_the_folder_of_a_run_serves_wherever_a_checkpoint_does(workspace: Path, tmp_path: Path):
    source = str(next((workspace / "slices").glob("*.h5ad")))
    run, data = str(workspace / "joint"), str(workspace / "processed")
    flags = ["--sample_mode", "expr_to_pos", "--num_steps", "2"]
    output = ["--output", str(tmp_path / "a.h5ad")]
    assert main(["sample", "--checkpoint", run, "--input_data", source, *flags, *output]) == 0
    output = ["--output", str(tmp_path / "e.npz")]
    assert main(["extract", "--checkpoint", run, "--data_dir", data, *output]) == 0
    generated = tmp_path / "scores.json"
    words = ["--data_dir", data, "--num_steps", "2", "--output", str(generated), "--no_report"]
    assert main(["test", "--checkpoint", run, *words]) == 0
    assert generated.is_file()


def test_an_empty_split_is_refused_with_what_to_use(workspace: Path, tmp_path: Path, capsys):
    for name, ratio in (("all", "1.0"), ("some", "0.9")):
        flags = ["--output_dir", str(tmp_path / name), "--train_ratio", ratio, "--val_ratio", "0"]
        assert main(["preprocess", "--input_dir", str(workspace / "slices"), *flags]) == 0
    capsys.readouterr()
    words = ["--checkpoint", str(checkpoint(workspace)), "--data_dir", str(tmp_path / "all")]
    assert main(["test", *words]) == 2
    said = capsys.readouterr().err
    assert "its test split has 0 cell(s)" in said
    assert "--input_data, or --split train" in said


def test_dissociated_cells_get_positions_when_no_mode_is_given(
    workspace: Path, tmp_path: Path, capsys
):
    dissociated = anndata.read_h5ad(next((workspace / "slices").glob("*.h5ad")))
    spatial = dissociated.copy()
    spatial.write_h5ad(tmp_path / "spatial.h5ad")
    dissociated.obsm.clear()
    dissociated.write_h5ad(tmp_path / "cells.h5ad")
    modes = []
    for name, model in (("cells", "joint"), ("spatial", "joint"), ("spatial", "expr_to_pos")):
        flags = ["--input_data", str(tmp_path / f"{name}.h5ad"), "--overwrite", "--num_steps", "2"]
        assert main(["sample", "--checkpoint", str(checkpoint(workspace, model)), *flags]) == 0
        modes.append(json.loads(capsys.readouterr().out)["mode"])
    assert modes == ["expr_to_pos", "joint", "expr_to_pos"]


def test_new_tissue_is_made_of_nothing_but_a_number_of_cells(
    workspace: Path, tmp_path: Path, capsys
):
    generated = tmp_path / "new.h5ad"
    arguments = ["--checkpoint", checkpoint(workspace), "--num_cells", 25, "--num_slices", 2]
    arguments += ["--sample_mode", "joint", "--num_steps", 4, "--output", generated]
    assert main(["sample", *map(str, arguments)]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == 50
    data = anndata.read_h5ad(generated)
    _, genes = load_for_use(checkpoint(workspace))
    assert list(data.var_names) == genes
    assert data.obs["slice_id"].value_counts().to_dict() == {"generated_0": 25, "generated_1": 25}
    assert np.isfinite(data.X).all()
    assert float(data.X.std()) > 0.1
    np.testing.assert_array_equal(data.X, data.layers["generated"])
    np.testing.assert_array_equal(data.obsm["spatial"], data.obsm["spatial_pred"])
    assert data.obsm["spatial"].shape == (50, data.uns["alphastomics"]["dims"])
    assert not np.allclose(data.obsm["spatial"][:25], data.obsm["spatial"][25:])
    assert "spatial_std" not in data.obsm


def test_new_tissue_that_came_out_planar_or_must_be_is_2d_and_a_volume_stays_3d():
    gen = torch.Generator().manual_seed(0)
    cells = blank_cells(Blank(200), 3, dims=3)
    zeros = np.zeros((200, 3), np.float32)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=gen))
    for thickness, known, dims in ((0.02, False, 2), (0.5, False, 3), (0.05, True, 2)):
        body = torch.randn(200, 3, generator=gen) * torch.tensor([3.0, 1.0, thickness])
        generated = Generated(zeros, zeros, (body @ turn).numpy(), zeros)
        filled, result = as_tissue(cells, generated, planar=known)
        assert filled.dims == dims
        lengths = np.linalg.norm(result.position - result.position.mean(0), axis=1)
        np.testing.assert_allclose(lengths, (body - body.mean(0)).norm(dim=1), atol=0.1)
        assert (result.position[:, 2] == 0).all() == (dims == 2)


def test_a_slice_larger_than_a_set_is_sampled_in_chunks_and_its_seam_is_said(
    workspace: Path, tmp_path: Path
):
    sampling = QUICK.model_copy(update={"mode": "expr_to_pos", "max_set_size": 40})
    generated = anndata.read_h5ad(
        sample(
            SETTINGS.model_copy(update={"sampling": sampling}), checkpoint=checkpoint(workspace),
            input_data=workspace / "slices/slice_0.h5ad", output=tmp_path / "o.h5ad", split="test",
            overwrite=False,
        )["output"]
    )  # fmt: skip
    seams = generated.uns["alphastomics"]["seams"]
    assert list(seams["slice_name"]) == ["slice_0"]
    assert list(seams["chunks"]) == [3]
    assert seams["rms"][0] > 0
    assert 0 < seams["relative"][0] < 2
    assert np.isfinite(generated.obsm["spatial_pred"]).all()


def test_cells_get_positions_in_the_frame_of_landmarks_or_of_a_reference(
    workspace: Path, tmp_path: Path
):
    source = workspace / "slices/slice_0.h5ad"
    data = anndata.read_h5ad(source)
    marks = tmp_path / "marks.csv"
    names, spots = data.obs_names[:30], data.obsm["spatial"][:30]
    lines = [f"{name},{x},{y}" for name, (x, y) in zip(names, spots, strict=True)]
    marks.write_text("\n".join(lines))
    for flags, kind, met in (
        (["--landmarks", marks, "--frame_scale"], "landmarks", spots),
        (["--reference", source], "cells in common", data.obsm["spatial"]),
    ):
        target = tmp_path / f"{kind}.h5ad"
        arguments = [
            "--checkpoint",
            checkpoint(workspace),
            "--input_data",
            source,
            "--num_steps",
            3,
        ]
        arguments += ["--sample_mode", "expr_to_pos", "--output", target, *flags]
        assert main(["sample", *map(str, arguments)]) == 0
        generated = anndata.read_h5ad(target)
        frame = generated.uns["alphastomics"]["frame"]
        assert list(frame["known"]) == [kind]
        result = generated.obsm["spatial_pred"][: len(met)]
        np.testing.assert_allclose(result.mean(0), met.mean(0), atol=1.0)
        rms = np.sqrt(((result - met) ** 2).sum(1).mean())
        assert frame["rms"][0] == pytest.approx(rms, rel=1e-3)


def test_a_frame_that_cannot_be_gets_one_line(workspace: Path, tmp_path: Path, capsys):
    (tmp_path / "few.csv").write_text("nobody,1,2\n")
    flags = {
        ("--landmarks", tmp_path / "few.csv"): "name no cell",
        ("--landmarks", tmp_path / "none.csv"): "no such file",
        ("--reference", tmp_path / "none.h5ad"): "no such file",
        ("--reference", tmp_path / "few.csv"): "no column is of numbers",
    }
    for (flag, path), words in flags.items():
        arguments = ["--checkpoint", checkpoint(workspace), "--input_data", workspace / "processed"]
        arguments += ["--sample_mode", "expr_to_pos", "--num_steps", 2, flag, path]
        assert main(["sample", "--output", str(tmp_path / "o.h5ad"), *map(str, arguments)]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert words in errors[-1]
        assert not (tmp_path / "o.h5ad").exists()


def test_the_same_seed_gives_the_same_cells_and_a_sample_is_single(workspace: Path):
    module, genes = load_for_use(checkpoint(workspace))
    cells = read_processed(workspace / "processed", genes, "test")
    one, two = (generate(module, cells, "expr_to_pos", QUICK, 3) for _ in range(2))
    np.testing.assert_array_equal(one.position, two.position)
    other = generate(module, cells, "expr_to_pos", QUICK, 4)
    assert not np.array_equal(one.position, other.position)
    single = QUICK.model_copy(update={"num_samples": 1, "estimator": "sample"})
    drawn = generate(module, cells, "pos_to_expr", single, 3)
    kept = generate(
        module, cells, "pos_to_expr", QUICK.model_copy(update={"estimator": "sample"}), 3
    )
    np.testing.assert_array_equal(drawn.expression, kept.expression)


def test_the_estimate_is_the_mean_of_one_call_predictions(workspace: Path):
    module, genes = load_for_use(checkpoint(workspace))
    cells = read_processed(workspace / "processed", genes, "test")
    estimate = generate(module, cells, "pos_to_expr", QUICK, 3)
    one_call = QUICK.model_copy(update={"num_steps": 1})
    np.testing.assert_allclose(
        estimate.expression, generate(module, cells, "pos_to_expr", one_call, 3).expression
    )
    drawn = generate(
        module, cells, "pos_to_expr", QUICK.model_copy(update={"estimator": "sample"}), 3
    )
    assert not np.allclose(estimate.expression, drawn.expression)
    np.testing.assert_allclose(estimate.expression_std, drawn.expression_std)


def test_a_planar_tissue_is_laid_into_the_plane():
    gen = torch.Generator().manual_seed(0)
    flat = torch.randn(50, 3, generator=gen, dtype=torch.float64) * torch.tensor([3.0, 1.0, 0.0])
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=gen, dtype=torch.float64))
    laid = (flat @ turn) @ plane_of(flat @ turn)
    assert float(laid[:, 2].abs().max()) < 1e-9 < laid[:, 0].var() - laid[:, 1].var()
    upright = flat[:, [1, 0, 2]] + 0.01 * flat[:, [2, 2, 1]] + 5
    assert torch.equal(plane_of(upright), torch.eye(3, dtype=torch.float64))


def test_scores_stand_beside_their_baselines(workspace: Path, tmp_path: Path):
    made, data, output = checkpoint(workspace), workspace / "processed", tmp_path / "scores.json"
    result = score(SETTINGS, checkpoint=made, input_data=data, split="test", output=output)
    written = json.loads(output.read_text())
    assert written == {key: value for key, value in result.items() if key != "output"}
    assert set(written["expr_to_pos"]) == {
        "alphastomics", "alphastomics sample", "shuffled", "half of the slice known", "ridge",
        "class centroid oracle", "expression kNN", "ExtraTrees", "ExtraTrees, sqrt",
        "ExtraTrees, smoothed",
    }  # fmt: skip
    assert set(written["pos_to_expr"]) == {
        "alphastomics", "alphastomics sample", "shuffled", "true expression", "spatial k-NN mean"
    }  # fmt: skip
    assert set(written["joint"]) == {
        "alphastomics", "real, same slice", "real, other slice", "shuffled", "genes shuffled"
    }  # fmt: skip
    ours = written["expr_to_pos"]["alphastomics"]
    assert ours["std_coverage_expected"] == pytest.approx(1 / 3)  # of two draws
    assert 0 <= ours["std_coverage"] <= 1
    types = {name: values["type_accuracy"] for name, values in written["pos_to_expr"].items()}
    assert types["true expression"] > types["shuffled"]
    real = written["joint"]["real, same slice"]
    assert real["moran_correlation"] > written["joint"]["shuffled"]["moran_correlation"]
    chance = written["expr_to_pos"]["shuffled"]["spearman_mean"]
    assert abs(chance) < 0.15
    assert written["expr_to_pos"]["class centroid oracle"]["spearman_mean"] > 0.4


def test_mean_and_sample_are_those_that_sampling_gives(workspace: Path):
    module, genes = load_for_use(checkpoint(workspace))
    cells = read_processed(workspace / "processed", genes, "test")
    for mode in ("expr_to_pos", "pos_to_expr"):
        both = mean_and_sample(module, cells, mode, QUICK, 3)
        for estimator, generated in (("mean", both.estimate), ("sample", both.sample)):
            alone = generate(
                module, cells, mode, QUICK.model_copy(update={"estimator": estimator}), 3
            )
            np.testing.assert_allclose(generated.position, alone.position, rtol=1e-5)
            np.testing.assert_allclose(generated.expression, alone.expression, rtol=1e-5)
        assert (both.envelope.low <= both.envelope.high).all()
        np.testing.assert_allclose(both.samples[0], both.sample.position, rtol=1e-4, atol=1e-2)


def test_test_prints_a_table_and_keeps_a_named_output(workspace: Path, tmp_path: Path, capsys):
    target = tmp_path / "scores.json"
    arguments = [
        "--checkpoint",
        checkpoint(workspace, "expr_to_pos"),
        "--no_report",
        "--num_steps",
        2,
    ]
    arguments += ["--data_dir", workspace / "processed", "--output", target, "--num_samples", 1]
    assert main(["test", *map(str, arguments)]) == 0
    shown = capsys.readouterr().out
    assert "spearman_mean" in shown
    assert f"scores: {target}" in shown
    assert "std_coverage" not in shown  # one draw has no spread
    assert set(json.loads(target.read_text())) == {"expr_to_pos"}
    assert main(["test", *map(str, arguments)]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_a_file_alone_is_scored_against_its_other_half(workspace: Path):
    module, genes = load_for_use(checkpoint(workspace))
    cells = read_query(workspace / "slices/slice_0.h5ad", genes, module.normalization, Config())
    scores = joint_scores(generate(module, cells, "joint", QUICK, 0), cells, None, 0)
    assert set(scores) == {"alphastomics", "real, other half", "shuffled", "genes shuffled"}


def test_a_specialised_checkpoint_says_what_it_can(workspace: Path, tmp_path: Path):
    with pytest.raises(InputError, match="trained for expr_to_pos alone"):
        run_sample(
            workspace, workspace / "processed", tmp_path / "x.h5ad", mode="pos_to_expr",
            checkpoint=checkpoint(workspace, "expr_to_pos"),
        )  # fmt: skip


def test_an_output_that_exists_is_kept_unless_overwrite(workspace: Path, tmp_path: Path):
    target = tmp_path / "out.h5ad"
    target.write_text("mine")
    with pytest.raises(InputError, match="--overwrite"):
        run_sample(workspace, workspace / "processed", target)
    assert target.read_text() == "mine"
    run_sample(workspace, workspace / "processed", target, overwrite=True)
    assert anndata.read_h5ad(target).n_obs > 0


def test_the_std_of_a_few_samples_is_not_too_small():
    # 1 and 3 about their mean 2: (1 + 1) / (2 - 1).
    samples = [torch.tensor([[[1.0]]]), torch.tensor([[[3.0]]])]
    moments = RunningMoments()
    moments.add(samples[0])
    assert float(moments.deviation()) == 0
    moments.add(samples[1])
    assert float(moments.deviation()) == pytest.approx(2**0.5)
