"""Embeddings: every cell once, in order, as the network itself gives them, in three formats."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from alphastomics.config import PreprocessingConfig, SimulationConfig
from alphastomics.diffusion_model.checkpoint import load_module
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.extract.folder import embedding
from alphastomics.main import main
from alphastomics.preprocessing.commands import preprocess
from alphastomics.preprocessing.resume import with_checksum
from alphastomics.simulate import write_tissue
from alphastomics.utils.dataholder import DataHolder
from tests.diffusion_model.conftest import tiny_config

SPLITS = ["train", "validation", "test"]
LAYERS, WIDTH = 2, 16


def processed_tissue(folder: Path, **settings) -> Path:
    simulation = SimulationConfig(cells=70, slices=3, genes=24, panel_share=0.9, common_frame=True)
    settings = {"common_frame": True, **settings}
    write_tissue(simulation, 5, folder / "slices", overwrite=False)
    preprocess(
        PreprocessingConfig(cell_type_key="cell_type", train_ratio=0.6, val_ratio=0.2, **settings),
        input_dir=folder / "slices",
        output_dir=folder / "processed",
        gene_list_file=None,
        seed=1,
        overwrite=False,
        scheduler=None,
    )
    return folder / "processed"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return processed_tissue(tmp_path_factory.mktemp("tissue"), layout="slice")


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory) -> Path:
    """Two epochs; sets are patches of 32 cells of a slice."""
    folder = tmp_path_factory.mktemp("runs")
    loading = {"set_size": 32, "set_draw": "patch"}
    train(tiny_config(data, folder, data={"loading": loading}), TrainRequest())
    return RunFolder(folder / "alphastomics").last


@pytest.fixture(scope="module")
def one_set(data: Path, tmp_path_factory) -> Path:
    """A checkpoint whose batch is one set of cells of all slices, which share a frame."""
    folder = tmp_path_factory.mktemp("runs")
    training = {"max_epochs": 1, "learning_rate": 0.05}
    loading = {"set_draw": "random"}
    config = tiny_config(data, folder, training=training, data={"loading": loading})
    train(config, TrainRequest())
    return RunFolder(folder / "alphastomics").last


@pytest.fixture
def run(data: Path, tmp_path: Path, monkeypatch, capsys):
    """Run `extract` in an empty folder; return its status and what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def start(checkpoint: Path, *arguments: object, data_dir: Path = data) -> tuple[int, str]:
        flags = ["--checkpoint", checkpoint, "--data_dir", data_dir, *arguments]
        status = main(["extract", *map(str, flags)])
        said = capsys.readouterr()
        return status, said.err if status else said.out

    return start


def read(path: str) -> dict:
    """Return what any of the formats holds, as numpy arrays, lists and text."""
    if path.endswith("npz"):
        with np.load(path, allow_pickle=False) as file:
            return {k: v if v.dtype.kind != "U" else v.tolist() for k, v in file.items()}
    if path.endswith("pt"):
        content = torch.load(path, weights_only=True)
        return {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in content.items()}
    with h5py.File(path) as file:
        return {k: text_or_array(v) for k, v in file.items()}


def text_or_array(column: h5py.Dataset):
    if h5py.check_string_dtype(column.dtype) is None:
        return column[()]
    text = column.asstr()[()]
    return text if isinstance(text, str) else text.tolist()


def cells_of(data: Path) -> dict[str, np.ndarray]:
    """Read the shards of all splits as they are, in the order of cell_id."""
    files = [(s, f) for s in SPLITS for f in sorted((data / "data").glob(f"{s}*.parquet"))]
    tables = [pq.read_table(file) for _, file in files]
    split = np.concatenate(
        [np.full(len(t), SPLITS.index(s)) for (s, _), t in zip(files, tables, strict=True)]
    )
    table = pa.concat_tables(tables)
    order = np.argsort(table["cell_id"].to_numpy())
    cells = {name: np.array(table[name].to_pylist())[order] for name in table.column_names}
    return {**cells, "split": split[order]}


def test_every_cell_has_one_row_in_the_order_of_its_number(run, checkpoint, data):
    status, said = run(checkpoint)
    result, cells = read("embeddings.npz"), cells_of(data)
    assert status == 0
    assert json.loads(said)["shape"] == list(result["embedding"].shape) == [210, WIDTH]
    assert result["embedding"].dtype == np.float32
    assert result["cell_id"].tolist() == list(range(210))
    for name in ("cell_id", "obs_name", "slice_id", "cell_type", "split"):
        assert np.array_equal(result[name], cells[name]), name
    metadata = json.loads((data / "metadata.json").read_text())
    assert result["slice_names"] == [record["name"] for record in metadata["slices"]]
    assert result["cell_type_names"] == metadata["cell_types"]
    assert (result["split_names"], result["extract_mode"]) == (SPLITS, "encoder")


def test_nothing_but_the_output_is_left(run, checkpoint, tmp_path):
    run(checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["embeddings.npz"]


def test_an_embedding_is_what_the_network_gives_for_the_clean_set(run, one_set, data):
    run(one_set, "--extract_mode", "all_layers", "--batch_size", 300)
    result, cells = read("embeddings.npz")["embedding"], cells_of(data)
    metadata = json.loads((data / "metadata.json").read_text())
    module, genes = load_module(one_set)
    measured = np.ones((3, len(genes)), dtype=bool)
    for number, record in enumerate(metadata["slices"]):
        measured[number, metadata["panels"][record["panel"]]["missing"]] = False
    for split in range(3):
        here = cells["split"] == split
        position = cells["position"][here] - cells["position"][here].mean(0)
        prediction = module.average(
            torch.tensor(cells["expression"][here], dtype=torch.float32)[None],
            torch.tensor(position / float(module.position_scale), dtype=torch.float32)[None],
            torch.zeros(1, 2),
            gene_mask=torch.tensor(measured[cells["slice_id"][here]])[None],
            output_hidden_states=True,
        )
        wanted = torch.stack(prediction.aux.hidden_states, dim=2)[0].detach().numpy()
        assert wanted.shape[1:] == (LAYERS + 1, WIDTH)
        np.testing.assert_allclose(result[here], wanted, atol=1e-5)


def test_all_layers_begins_with_the_encoder_and_ends_with_the_transformer(run, checkpoint):
    for mode in ("encoder", "transformer", "all_layers"):
        run(checkpoint, "--extract_mode", mode, "--output", f"{mode}.npz")
    layers = read("all_layers.npz")["embedding"]
    assert layers.shape == (210, LAYERS + 1, WIDTH)
    assert np.array_equal(layers[:, 0], read("encoder.npz")["embedding"])
    assert np.array_equal(layers[:, -1], read("transformer.npz")["embedding"])


def set_of(position: list[list[float]], num_genes: int) -> DataHolder:
    generator = torch.Generator().manual_seed(3)
    expression = torch.randn(1, 4, num_genes, generator=generator)[:, : len(position)]
    cells = torch.tensor([position])
    return DataHolder.of(expression, cells, torch.ones(cells.shape[:2], dtype=torch.bool))


def test_the_set_reaches_the_encoder_by_its_centre_alone_and_the_transformer_by_its_cells(one_set):
    module, genes = load_module(one_set)
    pair = [[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]]
    alone = set_of(pair, len(genes))
    same_centre = set_of([*pair, [5.0, 0.0, 1.0], [-5.0, 0.0, -1.0]], len(genes))
    other_centre = set_of([*pair, [5.0, 0.0, 1.0]], len(genes))

    def distance(other: DataHolder, mode: str) -> float:
        one, two = embedding(module, alone, mode), embedding(module, other, mode)
        return float((one - two[:, :2]).abs().max())

    assert distance(same_centre, "encoder") < 1e-6 < distance(other_centre, "encoder")
    assert distance(same_centre, "transformer") > 1e-5


def test_the_three_formats_hold_the_same(run, checkpoint):
    for kind in ("npz", "pt", "h5"):
        assert run(checkpoint, "--format", kind)[0] == 0
    first, *others = (read(f"embeddings.{kind}") for kind in ("npz", "pt", "h5"))
    for other in others:
        assert first.keys() == other.keys()
        for name, column in first.items():
            assert np.array_equal(column, other[name]), name
            assert getattr(column, "dtype", None) == getattr(other[name], "dtype", None), name


@pytest.mark.parametrize("kind", ["npz", "pt", "h5"])
def test_two_runs_write_the_same_bytes(run, checkpoint, tmp_path, kind):
    for name in ("one", "other"):
        run(checkpoint, "--extract_mode", "transformer", "--output", f"{name}.{kind}")
    one, other = (tmp_path / f"{name}.{kind}" for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_max_samples_keeps_some_cells_of_every_split_with_the_same_embedding(run, checkpoint):
    run(checkpoint, "--extract_mode", "transformer", "--output", "all.npz")
    run(checkpoint, "--extract_mode", "transformer", "--output", "some.npz", "--max_samples", 50)
    every, some = read("all.npz"), read("some.npz")
    rows = some["cell_id"]
    assert len(rows) == 50
    assert np.all(np.diff(rows) > 0)
    for name in ("embedding", "slice_id", "cell_type", "split"):
        assert np.array_equal(every[name][rows], some[name]), name
    assert [every["obs_name"][row] for row in rows] == some["obs_name"]
    shares = np.bincount(every["split"]) / len(every["split"]) * 50
    assert np.all(np.abs(np.bincount(some["split"]) - shares) <= 1)


def test_more_max_samples_than_cells_embeds_all(run, checkpoint):
    run(checkpoint, "--max_samples", 10**6)
    assert len(read("embeddings.npz")["cell_id"]) == 210


def test_sets_of_a_slice_come_from_the_shuffled_layout_too(run, checkpoint, tmp_path):
    shuffled = processed_tissue(tmp_path / "other", storage="sparse")
    run(checkpoint, data_dir=shuffled)
    assert read("embeddings.npz")["cell_id"].tolist() == list(range(210))


def test_the_ending_chooses_the_format_where_only_the_output_is_named(run, checkpoint):
    run(checkpoint, "--output", "cells.h5")
    assert read("cells.h5")["embedding"].shape == (210, WIDTH)


def test_overwrite_replaces_an_output(run, checkpoint, tmp_path):
    (tmp_path / "embeddings.npz").write_text("old")
    assert run(checkpoint, "--overwrite")[0] == 0
    assert len(read("embeddings.npz")["cell_id"]) == 210


REFUSED = {
    "--format h5 --output cells.npz": "leave --format out, or name the output cells.h5",
    "--format h5 --output embeddings.npz": "name the output embeddings.h5",
    "--output cells.csv": "must end in .npz, .pt, .h5",
    "--output there.npz": "there.npz: exists already; add --overwrite",
    "--output no/cells.npz": "there is no folder no; make it first",
    "--output folder.npz --overwrite": "folder.npz: is a folder",
    "--max_samples 0": "--max_samples",
    "--batch_size 40": "must be a multiple of set_size (32)",
    "--data_dir empty": "there is no metadata.json",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_gets_one_line_and_leaves_nothing(run, checkpoint, tmp_path, line):
    (tmp_path / "there.npz").write_text("old")
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    status, said = run(checkpoint, *line.split())
    assert (status, said.count("\n")) == (2, 1)
    assert REFUSED[line] in said
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.npz").read_text() == "old"


def without_a_gene(data: Path) -> None:
    metadata = json.loads((data / "metadata.json").read_text())
    metadata["genes"][0] = "another"
    (data / "metadata.json").write_text(json.dumps(with_checksum(metadata)))


def cut_short(data: Path) -> None:
    shard = data / "data" / "test.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("damage", "words"),
    [(without_a_gene, "first difference at gene 1"), (cut_short, "test.parquet: its checksum")],
)
def test_data_that_cannot_be_embedded_leaves_nothing(
    run, checkpoint, data, tmp_path, damage, words
):
    shutil.copytree(data, tmp_path / "copy")
    damage(tmp_path / "copy")
    status, said = run(checkpoint, data_dir=tmp_path / "copy")
    assert status == 2
    assert words in said
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_checkpoint_that_is_missing_or_damaged_is_refused(run, checkpoint, tmp_path):
    damaged = tmp_path / "damaged.ckpt"
    damaged.write_bytes(checkpoint.read_bytes()[:-200])
    for path, words in ((tmp_path / "no.ckpt", "no such checkpoint"), (damaged, "cut short")):
        status, said = run(path)
        assert (status, said.count("\n")) == (2, 1)
        assert words in said
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.ckpt"]
