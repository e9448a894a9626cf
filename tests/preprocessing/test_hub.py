"""Other readers of the folder: HF datasets, and our loader from afar."""

from pathlib import Path

import numpy as np
import pytest

from alphastomics.errors import InputError
from alphastomics.preprocessing.batch_loader import create_dataloaders
from tests.preprocessing.tissue import cells_of, make_slice, metadata_of, run, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slices whose names are those of splits must not mislead a reader."""
    root = tmp_path_factory.mktemp("hub")
    write(root / "in", test=make_slice(80, seed=1), train_eval=make_slice(90, seed=2))
    run(root / "in", root / "out", max_shard_size=60, common_frame=True)
    run(root / "in", root / "sparse", storage="sparse", common_frame=True)
    return root


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["out", "sparse"])
def test_load_dataset_reads_the_folder_as_it_is(folder, name, tmp_path):
    datasets = pytest.importorskip("datasets")
    where = str(folder / name)
    result = datasets.load_dataset("parquet", data_dir=where, cache_dir=str(tmp_path))
    expected = metadata_of(folder / name)["splits"]
    assert {split: len(result[split]) for split in result} == {
        split: record["cells"] for split, record in expected.items()
    }
    cells = cells_of(folder / name).set_index("cell_id")
    column = "expression" if name == "out" else "gene_value"
    for row in result["test"]:
        assert np.array_equal(np.float32(row[column]), cells[column][row["cell_id"]])
        assert np.array_equal(np.float64(row["position"]), cells["position"][row["cell_id"]])
    streamed = datasets.load_dataset("parquet", data_dir=where, streaming=True)
    assert sum(1 for _ in streamed["train"]) == expected["train"]["cells"]


def ids(loader) -> list[int]:
    return [int(i) for batch in loader for i in batch.cell_id[batch.node_mask]]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("name", ["out", "sparse"])
def test_a_folder_far_away_gives_the_batches_of_a_folder_here(folder, name, streaming):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(folder / name), "/far", recursive=True)
    try:
        for here, far in zip(
            create_dataloaders(folder / name, 32, streaming=streaming),
            create_dataloaders("memory://far", 32, streaming=streaming),
            strict=True,
        ):
            assert ids(here) == ids(far)
    finally:
        memory.rm("/far", recursive=True)


def test_a_hub_id_is_read_through_the_hubs_file_system(folder, monkeypatch):
    """A local folder stands in for the Hub, behind the very address that is asked for."""
    fsspec = pytest.importorskip("fsspec")
    asked = []

    def stand_in(address: str):
        asked.append(address)
        return fsspec.filesystem("dir", path=str(folder), target_protocol="file"), "out"

    monkeypatch.setattr("fsspec.core.url_to_fs", stand_in)
    train, _, _ = create_dataloaders("somebody/brain-atlas", 32, streaming=True)
    assert asked == ["hf://datasets/somebody/brain-atlas"]
    assert ids(train) == ids(create_dataloaders(folder / "out", 32, streaming=True)[0])


def test_the_hubs_file_system_is_what_the_address_leads_to():
    hub = pytest.importorskip("huggingface_hub")
    import fsspec

    result, path = fsspec.core.url_to_fs("hf://datasets/somebody/brain-atlas")
    assert isinstance(result, hub.HfFileSystem)
    assert path.endswith("datasets/somebody/brain-atlas")


def test_a_remote_shard_that_was_altered_is_refused(folder):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(folder / "out"), "/bad", recursive=True)
    try:
        shard = metadata_of(folder / "out")["splits"]["train"]["shards"][0]["file"]
        content = bytearray(memory.cat_file(f"/bad/{shard}"))
        content[500] ^= 1
        memory.pipe_file(f"/bad/{shard}", bytes(content))
        with pytest.raises(InputError, match=shard):
            ids(create_dataloaders("memory://bad", 32, streaming=True)[0])
    finally:
        memory.rm("/bad", recursive=True)
