"""Names and paths of every kind: they stay names, and nothing outside the output is written."""

import os
import shutil
from pathlib import Path

import anndata
import pandas as pd
import pytest

from tests.faults.conftest import Tiny
from tests.faults.door import Outcome, done, refused

NAMES = {
    "spaces": "two  words ",
    "quotes": 'it\'s "quoted"',
    "unicode": "皮质 é 🧠",
    "right to left": "\u202eevil\u202c",
    "newline": "first\nsecond",
    "tab and bell": "a\tb\a",
    "escape sequence": "\x1b[2J\x1b[31m",
    "leading dash": "--output_dir",
    "up and away": "../../outside/escaped",
    "absolute": "/tmp/alphastomics-escaped",
    "a dot": ".",
    "two dots": "..",
    "backslashes": "..\\..\\outside",
    "script": "<script>alert(1)</script>",
    "end of the script": "</script><script>alert(1)</script>",
    "percent and braces": "%s {0} {name} $HOME `id`",
    "comma and quote": 'a,"b',
    "300 letters": "x" * 300,
    "formula": "=1+1",
    "null word": "NA",
}


def named(tiny: Tiny, folder: Path, word: str) -> Path:
    """Write a slice whose cells, genes, slices and cell types carry a name."""
    folder.mkdir()
    data = anndata.read_h5ad(tiny.slice)
    data.obs_names = pd.Index([f"{word}{i}" for i in range(data.n_obs)], dtype=object)
    genes = [word, *data.var_names[1:]]
    data.var_names = pd.Index(genes, dtype=object)
    data.obs["slice_id"] = pd.Categorical([word] * data.n_obs)
    data.obs["cell_type"] = pd.Categorical([word] * data.n_obs)
    data.write_h5ad(folder / "named.h5ad")
    return folder / "named.h5ad"


def only_inside(outcome: Outcome, *places: str) -> None:
    done(outcome)
    strangers = [
        name
        for name in outcome.written
        if not any(name == place or name.startswith(f"{place}/") for place in places)
    ]
    assert strangers == []


@pytest.mark.parametrize("name", NAMES)
def test_names_in_the_data_stay_names(name, tiny, door, work):
    path = named(tiny, work / "in", NAMES[name])
    types = ("--cell_type_key", "cell_type")
    only_inside(
        door("preprocess", "--input_dir", path.parent, "--output_dir", "out", *types), "work/out"
    )
    model = ("--checkpoint", tiny.checkpoint, "--config", tiny.config)
    given = ("--input_data", path)
    places = ("--sample_mode", "expr_to_pos")
    only_inside(door("sample", *model, *given, *places, "--output", "made.h5ad"), "work/made.h5ad")
    only_inside(door("extract", *model, *given, "--output", "cells.h5ad"), "work/cells.h5ad")
    made = anndata.read_h5ad(work / "made.h5ad")
    assert set(made.obs["slice_id"]) == {NAMES[name]}
    assert not Path("/tmp/alphastomics-escaped").exists()


@pytest.mark.parametrize("name", ["up and away", "escape sequence", "end of the script", "newline"])
def test_a_model_trained_on_such_names_is_used_and_reported(name, tiny, door, work):
    path = named(tiny, work / "in", NAMES[name])
    settings = ("--config", tiny.config, "--data_dir", "out")
    types = ("--cell_type_key", "cell_type")
    done(door("preprocess", "--input_dir", path.parent, "--output_dir", "out", *types))
    only_inside(door("train", *settings, "--batch_size", 16, "--output_dir", "runs"), "work/runs")
    report = ("--input_data", path, "--num_steps", 1, "--num_samples", 1, "--output", "page.html")
    only_inside(door("report", "runs/alphastomics", *report), "work/page.html")
    page = (work / "page.html").read_text(encoding="utf-8")
    assert "</script><script>alert" not in page


PATHS = {
    "spaces": "two words",
    "quotes": 'it\'s "q"',
    "unicode": "皮质é",
    "leading dash": "-rf",
    "escape sequence": "\x1b[2J",
    "newline": "a\nb",
    "up and back": "../work/x",
    "percent": "%d%s",
    "glob": "*[a-z]?",
}


@pytest.mark.parametrize("name", PATHS)
def test_odd_paths_are_read_and_written_as_they_are(name, tiny, door, work):
    source = work / PATHS[name] / "slices"
    try:
        shutil.copytree(tiny.slices, source)
    except (OSError, UnicodeError):
        pytest.skip("this file system has no such names")
    target = f"./{PATHS[name]}/out"
    (source / "slice_0.h5ad").rename(source / f"{Path(PATHS[name]).name}.h5ad")
    done(door("preprocess", f"--input_dir={PATHS[name]}/slices", f"--output_dir={target}"))
    assert (work / target / "metadata.json").is_file()
    model = ("--checkpoint", tiny.checkpoint, "--data_dir", tiny.processed)
    done(door("extract", *model, f"--output={target}/cells.npz"))
    refused(door("extract", *model, f"--output={target}/cells.npz"), "exists")
    refused(door("train", f"--config={PATHS[name]}/nowhere.yaml"), "no such configuration file")


def test_names_that_are_no_text_are_refused_for_what_goes_into_files_of_text(tiny, door, work):
    odd = os.fsdecode(b"\xff\xfe")
    try:
        (work / "in" / odd).mkdir(parents=True)
    except OSError:
        pytest.skip("this file system has no such names")
    path = shutil.copy(tiny.slice, work / "in" / odd / "a.h5ad")
    target = ("--output_dir", "out")
    refused(door("preprocess", "--input_dir", work / "in", *target), "not UTF-8 text")
    refused(door("preprocess", "--input_dir", tiny.slices, f"--output_dir={odd}"), "not UTF-8 text")
    (work / f"{odd}.h5ad").symlink_to(path)
    model = ("--checkpoint", tiny.checkpoint)
    refused(door("sample", *model, "--input_data", work / f"{odd}.h5ad"), "not UTF-8 text")
    refused(
        door("extract", *model, "--data_dir", tiny.processed, f"--output={odd}/a.npz"), "--output"
    )


def test_relative_and_linked_folders_are_followed_for_reading(tiny, door, work):
    (work / "deep/er").mkdir(parents=True)
    (work / "deep/link").symlink_to(tiny.slices)
    (work / "model").symlink_to(tiny.checkpoint)
    done(door("preprocess", "--input_dir", "deep/er/../link", "--output_dir", "deep/er/../out"))
    done(door("extract", "--checkpoint", "model", "--data_dir", "deep/out", "--output", "a.npz"))


def test_a_linked_output_is_written_where_it_points_or_replaced_as_a_link(tiny, door, work):
    (work / "real").mkdir()
    (work / "link").symlink_to(work / "real")
    done(door("preprocess", "--input_dir", tiny.slices, "--output_dir", "link"))
    assert (work / "real/metadata.json").is_file()
    precious = work.parent / "outside/precious.txt"
    (work / "cells.npz").symlink_to(precious)
    model = ("--checkpoint", tiny.checkpoint, "--data_dir", tiny.processed)
    done(door("extract", *model, "--output", "cells.npz", "--overwrite"))
    assert precious.read_text() == "precious"
    assert not (work / "cells.npz").is_symlink()


def test_a_link_among_the_slices_that_goes_in_circles_is_no_input(own_slices, door):
    (own_slices / "loop").symlink_to(own_slices)
    (own_slices / "self.h5ad").symlink_to(own_slices / "self.h5ad")
    refused(door("preprocess", "--input_dir", own_slices, "--output_dir", "out"), "self.h5ad")
    (own_slices / "self.h5ad").unlink()
    done(door("preprocess", "--input_dir", own_slices, "--output_dir", "out"))
