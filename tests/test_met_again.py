"""A model in a later session, and training data that cannot be right: said in one line."""

import shutil
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pytest

from alphastomics import AlphaSTomics
from alphastomics.errors import InputError
from alphastomics.main import main
from alphastomics.preprocessing.genes import strangers_among
from tests.preprocessing.tissue import make_slice, metadata_of, run, write
from tests.test_generated_counts import QUICK, two_programs

FEW = ["--epochs", "1", "--d_model", "16", "--n_heads", "2", "--n_layers", "1"]
FEW += ["--set", "training.position_head_updates=5", "expression.updates=5", "--seed", "0"]


def words(*parts: object) -> list[str]:
    return list(map(str, parts))


def test_a_volume_learned_on_the_command_line_predicts_volumes(tmp_path: Path):
    data = make_slice(cells=60, dims=3)
    write(tmp_path / "in", one=data)
    loose = data.copy()
    del loose.obsm["spatial"]
    loose.write_h5ad(tmp_path / "loose.h5ad")
    asked = words(
        "preprocess",
        "--input_dir",
        tmp_path / "in",
        "--output_dir",
        tmp_path / "p",
        "--position_is_3d",
    )
    assert main([*asked, "--train_ratio", "1", "--val_ratio", "0"]) == 0
    asked = words("train", "--data_dir", tmp_path / "p", "--output_dir", tmp_path, *FEW)
    assert main([*asked, "--exp_name", "run", "--gpus", "0"]) == 0
    run_folder, made = tmp_path / "run", tmp_path / "made.h5ad"
    asked = words("sample", "--checkpoint", run_folder, "--input_data", tmp_path / "loose.h5ad")
    assert main([*asked, *words("--output", made, "--num_steps", 2)]) == 0
    assert anndata.read_h5ad(made).obsm["spatial_pred"].shape == (60, 3)
    model = AlphaSTomics.load(run_folder)
    assert model.predict_positions(loose, num_steps=2).shape == (60, 3)
    model.save(tmp_path / "saved")
    again = AlphaSTomics.load(tmp_path / "saved")
    assert again.predict_positions(loose, num_steps=2).shape == (60, 3)


def test_training_cells_that_were_moved_are_named_when_a_model_is_loaded(tmp_path: Path, caplog):
    data = two_programs(cells=200)
    data.obs["cell_type"] = np.where(data.obsm["spatial"][:, 0] > 50, "right", "left")
    keywords = {"cell_type_key": "cell_type", "seed": 0}
    model = AlphaSTomics(data, QUICK, folder=tmp_path / "here", **keywords).train()
    model.save(tmp_path / "saved")
    assert "temporary folder" not in caplog.text
    shutil.move(tmp_path / "here/processed", tmp_path / "there")
    query = two_programs(seed=1, cells=50)
    with pytest.raises(InputError, match="name the processed folder of the training with data_dir"):
        AlphaSTomics.load(tmp_path / "saved").predict_labels(query)
    again = AlphaSTomics.load(tmp_path / "saved", data_dir=tmp_path / "there")
    again.predict_labels(query)
    assert set(query.obs["cell_type_pred"]) <= {"left", "right"}
    with pytest.raises(InputError, match=r"AlphaSTomics\.load\(folder, data_dir="):
        again.predict_labels(query, data_dir=tmp_path / "there")


def test_a_model_whose_cells_go_with_the_session_says_so(tmp_path: Path, caplog):
    model = AlphaSTomics(two_programs(cells=60), QUICK, seed=0).train()
    model.save(tmp_path / "saved")
    assert "the training cells are in a temporary folder" in caplog.text


def test_slices_without_a_gene_in_common_are_pointed_out(tmp_path: Path, caplog):
    first, second = make_slice(), make_slice(seed=1)
    run(write(tmp_path / "in", a=first, b=second), tmp_path / "out")
    assert "shares no gene" not in caplog.text
    second.var_names = [f"other{number}" for number in range(second.n_vars)]
    run(write(tmp_path / "apart", a=first, b=second), tmp_path / "again")
    assert "a.h5ad: shares no gene with any other input (2 such inputs)" in caplog.text
    paths = [Path(name) for name in "abc"]
    assert strangers_among(list(zip(paths, [["x", "x"], ["y"], ["y"]], strict=True))) == [paths[0]]


def test_a_blank_is_no_label_and_very_many_labels_are_pointed_out(tmp_path: Path, caplog):
    data = make_slice(cells=40)
    data.obs["cell_type"] = pd.Categorical(["", " ", "A", "B"] * 10)
    folder = write(tmp_path / "in", one=data)
    run(folder, tmp_path / "out", cell_type_key="cell_type")
    assert metadata_of(tmp_path / "out")["cell_types"] == ["A", "B"]
    assert "different labels" not in caplog.text
    many = make_slice(cells=300)
    many.obs["cell_type"] = [f"{number / 7:.3f}" for number in range(300)]
    run(write(tmp_path / "many", one=many), tmp_path / "again", cell_type_key="cell_type")
    assert "obs['cell_type'] has 300 different labels (0.000, 0.143, 0.286)" in caplog.text


def test_a_handful_of_cells_is_no_training(tmp_path: Path, capsys, caplog):
    run(write(tmp_path / "in", one=make_slice(cells=5)), tmp_path / "out")
    assert "lie at one position" not in caplog.text
    asked = words("train", "--data_dir", tmp_path / "out", "--output_dir", tmp_path)
    assert main(asked) == 2
    assert "training cell(s), at least 10 are needed" in capsys.readouterr().err
