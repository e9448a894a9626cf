"""Cells without positions beside slices: in a split of their own, and nothing else changes."""

import json
from itertools import chain, pairwise, permutations
from pathlib import Path

import anndata
import numpy as np
import pytest
import yaml

from alphastomics.config import Config, PreprocessingConfig
from alphastomics.config.auto import resolve_config
from alphastomics.config.plan import Device
from alphastomics.errors import InputError
from alphastomics.preprocessing.batch_loader import create_dataloaders
from alphastomics.preprocessing.commands import stage1, stage2
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.resume import with_checksum
from alphastomics.preprocessing.schema import REFERENCE, SPLITS
from alphastomics.preprocessing.upload import dataset_card
from tests.preprocessing.tissue import (
    by_scanpy,
    cells_of,
    expression_of,
    make_slice,
    metadata_of,
    refused,
    run,
    write,
)

TYPED = {"cell_type_key": "cell_type"}


def dissociated(cells: int = 70, genes: int = 20, seed: int = 9, **options) -> anndata.AnnData:
    data = make_slice(cells, genes, seed, types=["A", "B"], name="loose", **options)
    del data.obsm["spatial"]
    return data


@pytest.fixture
def slices() -> dict[str, anndata.AnnData]:
    """Two slices, whose names come before and after that of the dissociated cells."""
    return {
        "a": make_slice(60, 12, 1, types=["A", "B"]),
        "z": make_slice(50, 12, 2, types=["A", "B"]),
    }


def shards_of(folder: Path, *, of_slices: bool = True) -> dict[str, bytes]:
    names = {
        shard["file"]
        for split, record in metadata_of(folder)["splits"].items()
        if (split != REFERENCE) == of_slices
        for shard in record["shards"]
    }
    return {name: (folder / name).read_bytes() for name in sorted(names)}


@pytest.mark.parametrize("storage", ["dense", "sparse"])
@pytest.mark.parametrize("layout", ["shuffled", "slice"])
def test_every_cell_is_in_one_split_and_slices_are_as_without_dissociated_cells(
    tmp_path, slices, storage, layout
):
    options = {**TYPED, "storage": storage, "layout": layout, "max_shard_size": 25}
    run(write(tmp_path / "plain", **slices), tmp_path / "before", **options)
    loose = dissociated()
    run(write(tmp_path / "in", **slices, m=loose), tmp_path / "out", **options)
    cells = cells_of(tmp_path / "out")
    every = chain.from_iterable(data.obs_names for data in (*slices.values(), loose))
    assert sorted(cells["obs_name"]) == sorted(every)
    assert (cells["cell_id"] == np.arange(180)).all()
    mine = cells[cells["split"] == REFERENCE].set_index("obs_name").loc[loose.obs_names]
    assert (mine["slice_id"] == 2).all()
    assert np.isnan(np.stack(mine["position"])).all()
    assert not np.isnan(np.stack(cells[cells["split"] != REFERENCE]["position"])).any()
    assert [["A", "B"][number] for number in mine["cell_type"]] == list(loose.obs["cell_type"])
    genes = metadata_of(tmp_path / "out")["genes"]
    expected = by_scanpy(loose, genes, log=True, scale=True)
    np.testing.assert_allclose(expression_of(tmp_path / "out", mine), expected, atol=2e-5)
    # Bytes of all other shards, and all that is known of slices.
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "before")
    before, after = metadata_of(tmp_path / "before"), metadata_of(tmp_path / "out")
    for key in ("genes", "slices", "position_statistics", "common_frame", "normalization"):
        assert after[key] == before[key], key
    assert after["references"][0]["cells"] == 70
    assert before["references"] == []


def test_the_plan_of_a_training_is_that_without_dissociated_cells(tmp_path, slices):
    run(write(tmp_path / "plain", **slices), tmp_path / "before", **TYPED)
    run(write(tmp_path / "in", **slices, m=dissociated(500)), tmp_path / "out", **TYPED)
    device = Device("cpu", "cores", 1, 2)
    before, after = (
        resolve_config(Config(), DataFolder(tmp_path / name).metadata(), device)
        for name in ("before", "out")
    )
    assert (after.choices, after.holdout) == (before.choices, before.holdout)
    assert (after.updates, after.seconds) == (before.updates, before.seconds)
    assert not any("dissociated" in line for line in before.lines())
    said = [line for line in after.lines() if "dissociated" in line]
    assert said == [
        "500 dissociated cells teach the count model (genes and types), impute and label; nothing "
        "that is learned of positions sees them"
    ]


def test_no_loader_shows_a_cell_without_a_position(tmp_path, slices):
    run(write(tmp_path / "in", **slices, m=dissociated()), tmp_path / "out", layout="slice")
    for streaming in (False, True):
        loaders = create_dataloaders(tmp_path / "out", 20, streaming=streaming, num_workers=0)
        seen = [batch.cell_id[batch.node_mask] for loader in loaders for batch in loader]
        assert sorted(np.concatenate(seen).tolist()) == list(range(110))


def test_the_gene_list_is_that_of_slices_unless_a_file_lists_more(tmp_path, slices, caplog):
    source = write(tmp_path / "in", **slices, m=dissociated(genes=20))
    run(source, tmp_path / "out")
    assert metadata_of(tmp_path / "out")["num_genes"] == 12
    assert (
        "12 of its 20 genes are in the gene list of 12 genes; a gene list of your own"
        in caplog.text
    )
    assert "m.h5ad: its 70 cells have no positions (keys of obsm: none)" in caplog.text
    listed = tmp_path / "genes.txt"
    listed.write_text("\n".join(f"g{number:03d}" for number in range(16)))
    run(source, tmp_path / "more", genes=listed)
    metadata = metadata_of(tmp_path / "more")
    panels = [metadata["panels"][record["panel"]]["missing"] for record in metadata["slices"]]
    assert panels == [[12, 13, 14, 15]] * 2
    reference = metadata["panels"][metadata["references"][0]["panel"]]
    assert reference["missing"] == []


def test_dissociated_cells_alone_are_refused_in_one_line(tmp_path):
    loose = dissociated()
    words = ("one.h5ad", "have no positions", "obsm['spatial'] is missing", "--position_key")
    refused(write(tmp_path / "in", one=loose), tmp_path / "out", *words, "expr_to_pos")
    two = write(tmp_path / "two", one=loose, two=dissociated(seed=4))
    refused(two, tmp_path / "out", "one.h5ad", "no other input has positions either")


def test_coordinates_of_another_name_are_no_dissociated_cells(tmp_path, slices):
    named, columns = (slices["a"].copy() for _ in range(2))
    named.obsm["coords"] = named.obsm.pop("spatial")
    refused(write(tmp_path / "named", b=named, z=slices["z"]), tmp_path / "out", "coords")
    columns.obs["x"], columns.obs["y"] = columns.obsm.pop("spatial").T
    source = write(tmp_path / "columns", b=columns, z=slices["z"])
    # No key could be named.
    said = "keys of obsm: none): put obs['x'] and obs['y'] into obsm['spatial'] (--format stereoseq"
    refused(source, tmp_path / "out", "b.h5ad", said)
    alone = write(tmp_path / "alone", b=columns)
    run(alone, tmp_path / "taken", format="stereoseq")
    assert metadata_of(tmp_path / "taken")["splits"]["train"]["cells"] > 0
    embedded = dissociated()
    embedded.obsm["X_umap"] = np.zeros((70, 2))
    run(write(tmp_path / "in", **slices, m=embedded), tmp_path / "out")
    assert metadata_of(tmp_path / "out")["splits"][REFERENCE]["cells"] == 70


def test_a_z_that_was_measured_is_found_beside_dissociated_cells(tmp_path):
    source = write(tmp_path / "in", a=dissociated(), b=make_slice(40, 12, 1, dims=3))
    run(source, tmp_path / "out")
    assert [record["z"] for record in metadata_of(tmp_path / "out")["slices"]] == [None]


def staged(tmp_path: Path, name: str, **data: anndata.AnnData) -> Path:
    genes = tmp_path / "genes.txt"
    genes.write_text("\n".join(f"g{number:03d}" for number in range(12)))
    stage1(
        PreprocessingConfig(**TYPED),
        input_dir=write(tmp_path / f"in-{name}", **data),
        output_dir=tmp_path / name,
        gene_list_file=genes,
        overwrite=False,
        scheduler=None,
    )
    return tmp_path / name


def merged(folders: list[Path], target: Path) -> Path:
    stage2(
        PreprocessingConfig(max_shard_size=30),
        input_dirs=folders,
        output_dir=target,
        seed=1,
        overwrite=False,
        scheduler=None,
    )
    return target


def test_a_dataset_of_dissociated_cells_is_merged_wherever_it_is_named(tmp_path, slices):
    loose = dissociated(genes=12)
    both = staged(tmp_path, "both", a=slices["a"], m=loose)
    single = staged(tmp_path, "single", z=slices["z"])
    alone = staged(tmp_path, "alone", other=dissociated(30, seed=5))
    outcomes = []
    for number, order in enumerate(permutations([both, alone, single])):
        done = merged(list(order), tmp_path / f"merged{number}")
        metadata, cells = metadata_of(done), cells_of(done)
        names = {record["name"]: record for record in metadata["references"]}
        assert {name: record["cells"] for name, record in names.items()} == {"m": 70, "other": 30}
        assert metadata["splits"][REFERENCE]["cells"] == 100
        assert (cells["cell_id"] == np.arange(210)).all()
        mine = cells.set_index("obs_name").loc[loose.obs_names]
        assert (mine["slice_id"] == 2 + [*names].index("m")).all()
        expected = by_scanpy(loose, metadata["genes"], log=True, scale=True)
        np.testing.assert_allclose(expression_of(done, mine), expected, atol=2e-5)
        z_values = sorted(record["z"] for record in metadata["slices"])
        assert [last - first for first, last in pairwise(z_values)] == [10.0]
        if order.index(both) < order.index(single):
            outcomes.append(shards_of(done))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    with pytest.raises(InputError, match=r"no cell of .*alone has a position"):
        merged([alone], tmp_path / "no")


def test_a_folder_of_before_reads_as_it_did(tmp_path, slices):
    run(write(tmp_path / "in", **slices), tmp_path / "out")
    path = tmp_path / "out/metadata.json"
    record = metadata_of(tmp_path / "out")
    del record["references"], record["record_sha256"]
    path.write_text(json.dumps(with_checksum(record)))
    metadata = DataFolder(tmp_path / "out").metadata()
    assert metadata.references == []
    assert set(metadata.splits) == set(SPLITS)
    loaders = create_dataloaders(tmp_path / "out", 20, num_workers=0)
    assert sum(int(batch.node_mask.sum()) for loader in loaders for batch in loader) == 110


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: record["splits"].pop(REFERENCE),
        lambda record: record["references"].clear(),
        lambda record: record["references"][0].update(cells=71),
        lambda record: record["references"][0].update(panel=9),
    ],
)
def test_a_record_whose_dissociated_cells_do_not_add_up_is_refused(tmp_path, slices, spoil):
    run(write(tmp_path / "in", **slices, m=dissociated()), tmp_path / "out")
    record = metadata_of(tmp_path / "out")
    del record["record_sha256"]
    spoil(record)
    (tmp_path / "out/metadata.json").write_text(json.dumps(with_checksum(record)))
    with pytest.raises(InputError, match=r"metadata\.json"):
        DataFolder(tmp_path / "out").metadata()


def test_overwriting_removes_the_dissociated_cells_of_before(tmp_path, slices):
    run(write(tmp_path / "in", **slices, m=dissociated()), tmp_path / "out")
    assert (tmp_path / "out/data/reference.parquet").is_file()
    again = run(tmp_path / "in", tmp_path / "out")
    assert again["state"] == "was finished before"
    run(write(tmp_path / "plain", **slices), tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out/data/reference.parquet").exists()


def test_huggingface_datasets_reads_the_splits_of_slices_and_the_reference_by_name(
    tmp_path, slices
):
    datasets = pytest.importorskip("datasets")
    run(write(tmp_path / "in", **slices, m=dissociated()), tmp_path / "out")
    folder, cache = str(tmp_path / "out"), str(tmp_path / "cache")
    usual = datasets.load_dataset("parquet", data_dir=folder, cache_dir=cache)
    assert {name: len(split) for name, split in usual.items()} == {
        "train": 88,
        "validation": 11,
        "test": 11,
    }
    files = {REFERENCE: f"{folder}/data/reference*.parquet"}
    named = datasets.load_dataset("parquet", data_files=files, cache_dir=cache)
    assert len(named[REFERENCE]) == 70


def test_the_dataset_card_lists_dissociated_cells_as_a_split(tmp_path, slices):
    run(write(tmp_path / "in", **slices, m=dissociated()), tmp_path / "out")
    card = dataset_card(DataFolder(tmp_path / "out").metadata(), "owner/name", {"license": "mit"})
    [config] = yaml.safe_load(card.split("---")[1])["configs"]
    assert config["data_files"][-1] == {"split": REFERENCE, "path": ["data/reference.parquet"]}
    assert "110 cells in 2 slices" in card
    assert "70 dissociated cells, which have none, are the split reference" in card
    assert "| slice_id | slice | train | validation | test |" in card
