"""Bad input of `sample` and `test`: one line, status 2, nothing written, and no code run."""

from pathlib import Path

import anndata
import numpy as np
import pytest
import torch

from alphastomics.main import main
from tests.generation.conftest import checkpoint


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def bad_inputs(workspace: Path, folder: Path) -> dict[str, tuple[Path, str]]:
    """Make each kind of bad input; return it with the words of its refusal."""
    slice_0 = anndata.read_h5ad(workspace / "slices/slice_0.h5ad")
    strange = slice_0.copy()
    strange.var_names = [f"Other{number}" for number in range(strange.n_vars)]
    strange.write_h5ad(folder / "strange.h5ad")
    slice_0[:1].write_h5ad(folder / "one.h5ad")
    slice_0[:0].write_h5ad(folder / "zero.h5ad")
    silent = slice_0.copy()
    silent.X = silent.X * 0
    silent.write_h5ad(folder / "silent.h5ad")
    spoilt = slice_0.copy()
    spoilt.X.data[3] = np.nan
    spoilt.write_h5ad(folder / "nan.h5ad")
    torch.save({"expression": Payload(folder / "mark")}, folder / "evil.pt")
    torch.save({"expression": torch.zeros(5, 3)}, folder / "narrow.pt")
    torch.save({"positions": torch.full((5, 3), torch.nan)}, folder / "nan.pt")
    torch.save({"positions": torch.zeros(1, 3)}, folder / "one.pt")
    torch.save(torch.zeros(5, 3), folder / "bare.pt")
    (folder / "empty.h5ad").write_bytes(b"")
    (folder / "text.csv").write_text("x")
    return {
        "no shared gene": (folder / "strange.h5ad", "none of the"),
        "no counts": (folder / "silent.h5ad", "none of its 90 cells has a count"),
        "one cell": (folder / "one.h5ad", "at least 2"),
        "no cell": (folder / "zero.h5ad", "at least 2"),
        "one cell in tensors": (folder / "one.pt", "at least 2"),
        "NaN in tensors": (folder / "nan.pt", "NaN"),
        "no dict": (folder / "bare.pt", "expected a dict"),
        "NaN": (folder / "nan.h5ad", "NaN"),
        "code": (folder / "evil.pt", "not a file of tensors"),
        "wrong genes": (folder / "narrow.pt", "has shape"),
        "not HDF5": (folder / "empty.h5ad", "not an HDF5 file"),
        "another format": (folder / "text.csv", "the table cannot be read"),
        "missing": (folder / "none.h5ad", "no such file"),
    }


def test_bad_input_gets_one_line_and_leaves_nothing(workspace: Path, tmp_path: Path, capsys):
    for source, words in bad_inputs(workspace, tmp_path).values():
        before = sorted(tmp_path.iterdir())
        arguments = ["--checkpoint", checkpoint(workspace), "--input_data", source]
        arguments += ["--sample_mode", "expr_to_pos", "--output", tmp_path / "o.h5ad"]
        assert main(["sample", *map(str, arguments)]) == 2
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1
        assert words in errors
        assert sorted(tmp_path.iterdir()) == before
    assert not (tmp_path / "mark").exists()


def refusal(capsys, *arguments: object) -> str:
    """Run a command that must be refused; return its one line."""
    assert main(list(map(str, arguments))) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_a_mode_that_the_checkpoint_was_not_trained_for_is_refused_with_what_it_can(
    workspace: Path, tmp_path: Path, capsys
):
    call = ["sample", "--checkpoint", checkpoint(workspace, "expr_to_pos")]
    call += ["--input_data", workspace / "processed", "--output", tmp_path / "o.h5ad"]
    for mode in ("pos_to_expr", "joint"):
        said = refusal(capsys, *call, "--sample_mode", mode)
        assert "trained for expr_to_pos alone" in said
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_sampler_is_refused_with_those_there_are(workspace: Path, capsys):
    call = ["sample", "--checkpoint", checkpoint(workspace), "--num_cells", 9]
    said = refusal(capsys, *call, "--sampler", "euler")
    assert all(name in said for name in ("ddim", "ddpm", "dpmpp"))


def test_more_steps_than_the_schedule_has_are_refused(workspace: Path, tmp_path: Path, capsys):
    call = ["sample", "--checkpoint", checkpoint(workspace), "--num_cells", 9]
    said = refusal(capsys, *call, "--num_steps", 5000, "--output", tmp_path / "o.h5ad")
    assert "expected 1 to 1000" in said


def test_expression_at_no_position_is_refused(workspace: Path, tmp_path: Path, capsys):
    data = anndata.read_h5ad(workspace / "slices/slice_0.h5ad")
    del data.obsm["spatial"]
    data.write_h5ad(tmp_path / "placeless.h5ad")
    call = ["sample", "--checkpoint", checkpoint(workspace), "--sample_mode", "pos_to_expr"]
    assert "no coordinates" in refusal(capsys, *call, "--input_data", tmp_path / "placeless.h5ad")
    scored = ["test", "--checkpoint", checkpoint(workspace), "--no_report"]
    said = refusal(capsys, *scored, "--input_data", tmp_path / "placeless.h5ad")
    assert "no positions to score against" in said


def test_fewer_test_cells_than_neighbours_are_refused(workspace: Path, tmp_path: Path, capsys):
    anndata.read_h5ad(workspace / "slices/slice_0.h5ad")[:10].write_h5ad(tmp_path / "few.h5ad")
    call = ["test", "--checkpoint", checkpoint(workspace), "--no_report", "--num_steps", 2]
    said = refusal(capsys, *call, "--input_data", tmp_path / "few.h5ad")
    assert f"{tmp_path / 'few.h5ad'}: has 10 cells in 1 slice(s)" in said
    assert "at least 11 cells: score another split (--split train or validation)" in said


def test_a_split_that_is_too_small_to_be_scored_is_named(workspace: Path, tmp_path: Path, capsys):
    processed = tmp_path / "processed"
    slices = ["--input_dir", str(workspace / "slices"), "--output_dir", str(processed)]
    assert main(["preprocess", *slices, "--train_ratio", "0.9", "--val_ratio", "0.08"]) == 0
    capsys.readouterr()
    call = ["test", "--checkpoint", checkpoint(workspace), "--no_report", "--num_steps", 2]
    said = refusal(capsys, *call, "--data_dir", processed)
    assert f"{processed}, test split: has " in said
    assert "a smaller --train_ratio" in said


def test_a_position_that_is_no_number_is_refused(workspace: Path, tmp_path: Path, capsys):
    data = anndata.read_h5ad(workspace / "slices/slice_0.h5ad")
    data.obsm["spatial"][4, 1] = np.nan
    data.write_h5ad(tmp_path / "nan.h5ad")
    call = ["sample", "--checkpoint", checkpoint(workspace), "--sample_mode", "pos_to_expr"]
    said = refusal(capsys, *call, "--input_data", tmp_path / "nan.h5ad")
    assert "row 4" in said


@pytest.mark.parametrize("command", ["sample", "test"])
def test_a_query_in_other_units_is_said(command, workspace: Path, tmp_path: Path, capsys):
    data = anndata.read_h5ad(workspace / "slices/slice_0.h5ad")
    words = {}
    for unit, factor in (("um", 1.0), ("mm", 1e-3)):
        other = data.copy()
        other.obsm["spatial"] = other.obsm["spatial"] * factor
        other.write_h5ad(tmp_path / f"{unit}.h5ad")
        flags = ["--input_data", tmp_path / f"{unit}.h5ad", "--num_steps", 2, "--num_samples", 1]
        flags += ["--sample_mode", "expr_to_pos"] if command == "sample" else ["--no_report"]
        flags += ["--checkpoint", checkpoint(workspace, "expr_to_pos"), "--overwrite"]
        flags += ["--output", tmp_path / ("o.h5ad" if command == "sample" else "o.json")]
        assert main([command, *map(str, flags)]) == 0
        words[unit] = capsys.readouterr().err
    assert "times the size of the training slices" in words["mm"]
    assert "times the size of the training slices" not in words["um"]


def without_counts(workspace: Path, folder: Path, cells: int) -> Path:
    """Write a slice whose first cells have no counts."""
    data = anndata.read_h5ad(workspace / "slices/slice_0.h5ad")
    counts = data.X.toarray()
    counts[:cells] = 0
    data.X = counts
    data.write_h5ad(folder / "few.h5ad")
    return folder / "few.h5ad"


@pytest.mark.parametrize("mode", ["expr_to_pos", "impute", "label", "pos_to_expr"])
def test_cells_without_counts_are_said_where_expression_is_read(
    workspace: Path, tmp_path: Path, capsys, mode: str
):
    source = without_counts(workspace, tmp_path, 7)
    arguments = ["--checkpoint", checkpoint(workspace), "--input_data", source]
    arguments += ["--sample_mode", mode, "--output", tmp_path / "o.h5ad"]
    assert main(["sample", *map(str, arguments)]) == 0
    said = capsys.readouterr().err
    assert ("7 of 90 cells have no count" in said) == (mode != "pos_to_expr")


def test_positions_alone_may_come_without_counts(workspace: Path, tmp_path: Path):
    source = without_counts(workspace, tmp_path, 90)
    arguments = ["--checkpoint", checkpoint(workspace), "--input_data", source]
    arguments += ["--sample_mode", "pos_to_expr", "--output", tmp_path / "o.h5ad"]
    assert main(["sample", *map(str, arguments)]) == 0


def test_test_refuses_cells_without_counts(workspace: Path, tmp_path: Path, capsys):
    source = without_counts(workspace, tmp_path, 90)
    arguments = ["--checkpoint", checkpoint(workspace), "--input_data", source]
    assert main(["test", *map(str, arguments), "--output", str(tmp_path / "s.json")]) == 2
    assert "none of its 90 cells has a count" in capsys.readouterr().err
