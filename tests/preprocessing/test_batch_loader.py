"""Batches: every cell exactly once, the same numbers as on disk, resumable anywhere."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from alphastomics.errors import InputError
from alphastomics.preprocessing.batch_loader import BatchLoader, create_dataloaders
from alphastomics.utils.dataholder import DataHolder
from tests.preprocessing.tissue import (
    cells_of,
    expression_of,
    make_slice,
    metadata_of,
    run,
    write,
)

SPLITS = ("train", "validation", "test")
FOLDERS = [
    f"{layout}-{storage}" for layout in ("shuffled", "slice") for storage in ("dense", "sparse")
]
GENES = [[f"g{i}" for i in range(8)], [f"g{i}" for i in range(3, 12)]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slices of one frame in every layout and storage, with many small shards and row groups."""
    root = tmp_path_factory.mktemp("processed")
    source = write(
        root / "in",
        one=make_slice(180, GENES[0], 1, types=["a", "b"]),
        two=make_slice(150, GENES[1], 2, slices=["x", "y", "z"], types=["b", "c"]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("alphastomics.preprocessing.shards.LONGEST_ROW_GROUP", 16)
        for name in FOLDERS:
            layout, storage = name.split("-")
            run(
                source,
                root / name,
                layout=layout,
                storage=storage,
                cell_type_key="cell_type",
                max_shard_size=70,
                max_cells_per_file=40,
                common_frame=True,
            )
    return root


def loaders(folder: Path, **options) -> tuple[BatchLoader, BatchLoader, BatchLoader]:
    settings = {"batch_size": 32, "num_workers": 0, "buffer_size": 64} | options
    return create_dataloaders(folder, **settings)


def real_ids(batches: list[DataHolder]) -> list[int]:
    return [int(i) for batch in batches for i in batch.cell_id[batch.node_mask]]


def same(one: DataHolder, two: DataHolder) -> bool:
    names = ("expression", "positions", "node_mask", "cell_type", "slice_id", "cell_id")
    return all(torch.equal(getattr(one, name), getattr(two, name)) for name in names)


def modes() -> list[tuple[str, bool, str]]:
    """List all that can be asked: folder, streaming, draw."""
    every = itertools.product(FOLDERS, (True, False), ("random", "slice", "patch"))
    return [
        (folder, streaming, draw)
        for folder, streaming, draw in every
        if draw == "random" or not streaming or folder.startswith("slice")
    ]


@pytest.mark.parametrize(("name", "streaming", "draw"), modes())
def test_batches_hold_every_cell_of_the_split_once_with_its_own_numbers(
    folders, name, streaming, draw
):
    cells, metadata = cells_of(folders / name), metadata_of(folders / name)
    values = expression_of(folders / name, cells)
    splits = loaders(folders / name, streaming=streaming, set_draw=draw, set_size=8)
    for split, loader in zip(SPLITS, splits, strict=True):
        batches = list(loader)
        assert len(batches) == len(loader)
        assert sorted(real_ids(batches)) == sorted(cells["cell_id"][cells["split"] == split])
        for batch in batches:
            assert batch.expression.shape == (4, 8, 12)
            mask, rows = batch.node_mask, batch.cell_id[batch.node_mask].numpy()
            assert np.array_equal(batch.expression[mask].numpy(), values[rows])
            assert np.array_equal(
                batch.positions[mask].numpy(), np.stack(cells["position"][rows].to_numpy())
            )
            assert batch.cell_type[mask].tolist() == cells["cell_type"][rows].tolist()
            assert batch.slice_id[mask].tolist() == cells["slice_id"][rows].tolist()
            for field in (batch.expression, batch.positions):
                assert not field[~mask].any()
            for field in (batch.cell_type, batch.slice_id, batch.cell_id):
                assert (field[~mask] == -1).all()
            for cell, slice_id in zip(batch.gene_mask[mask], batch.slice_id[mask], strict=True):
                panel = metadata["panels"][metadata["slices"][slice_id]["panel"]]
                assert np.flatnonzero(~cell.numpy()).tolist() == panel["missing"]
            assert not batch.gene_mask[~mask].any()


@pytest.mark.parametrize(("name", "streaming", "draw"), modes())
def test_two_ranks_with_two_workers_see_the_split_exactly_once_in_equally_many_batches(
    folders, name, streaming, draw
):
    options = {"streaming": streaming, "set_draw": draw, "set_size": 4, "num_workers": 2}
    ranks = [loaders(folders / name, rank=r, world_size=2, **options)[0] for r in range(2)]
    batches = [list(loader) for loader in ranks]
    assert len(batches[0]) == len(batches[1]) == len(ranks[0]) == len(ranks[1])
    cells = cells_of(folders / name)
    expected = sorted(cells["cell_id"][cells["split"] == "train"])
    assert sorted(real_ids(batches[0]) + real_ids(batches[1])) == expected


@pytest.mark.parametrize(("name", "streaming", "draw"), modes())
def test_a_loader_resumes_with_the_very_next_batch_also_across_the_epochs_end(
    folders, name, streaming, draw
):
    options = {"streaming": streaming, "set_draw": draw, "set_size": 8, "rank": 1, "world_size": 2}
    whole = loaders(folders / name, **options)[0]
    expected = [batch for _ in range(3) for batch in whole]
    length = len(whole)
    for taken in (0, 1, length - 1, length, length + 1, 2 * length):
        first = loaders(folders / name, num_workers=2, **options)[0]
        endless = itertools.chain.from_iterable(iter(first) for _ in itertools.count())
        for _ in range(taken):
            next(endless)
        state = first.state_dict()
        resumed = loaders(folders / name, **options)[0]
        resumed.load_state_dict(state)
        result = [*resumed, *resumed][: 3 * length - taken]
        wanted = expected[taken : taken + len(result)]
        assert len(result) >= length
        assert all(same(one, two) for one, two in zip(result, wanted, strict=True))


@pytest.mark.parametrize("streaming", [True, False])
def test_the_order_depends_on_seed_epoch_and_rank_and_on_nothing_else(folders, streaming):
    def order(epoch: int = 0, **options) -> list[int]:
        loader = loaders(folders / "shuffled-dense", streaming=streaming, **options)[0]
        loader.set_epoch(epoch)
        return real_ids(list(loader))

    first = order()
    assert order() == first
    assert order(num_workers=3) == first
    assert order(verify_checksums=False) == first
    assert order(seed=43) != first
    assert order(epoch=1) != first
    loader = loaders(folders / "shuffled-dense", streaming=streaming)[0]
    assert real_ids(list(loader)) == first
    assert real_ids(list(loader)) == order(epoch=1)
    loader.set_epoch(0)
    assert real_ids(list(loader)) == first


def test_validation_and_test_are_the_same_in_every_epoch(folders):
    for loader in loaders(folders / "shuffled-dense", streaming=True)[1:]:
        assert real_ids(list(loader)) == real_ids(list(loader))


def test_a_resumed_epoch_keeps_its_position_when_the_trainer_names_it_again(folders):
    first = loaders(folders / "shuffled-dense")[0]
    first.set_epoch(2)
    expected = list(first)
    first.set_epoch(2)
    batches = iter(first)
    next(batches)
    resumed = loaders(folders / "shuffled-dense")[0]
    resumed.load_state_dict(first.state_dict())
    resumed.set_epoch(2)
    assert same(next(iter(resumed)), expected[1])


def test_a_state_of_other_settings_is_refused(folders):
    state = loaders(folders / "shuffled-dense", batch_size=16)[0].state_dict()
    with pytest.raises(InputError, match="batch_size 16, but batch_size is now 32"):
        loaders(folders / "shuffled-dense")[0].load_state_dict(state)


def test_sets_of_one_slice_and_patches_never_mix_slices(folders):
    for name, streaming in (("slice-dense", True), ("shuffled-dense", False)):
        for draw in ("slice", "patch"):
            for batch in loaders(folders / name, streaming=streaming, set_draw=draw, set_size=8)[0]:
                for mask, ids in zip(batch.node_mask, batch.slice_id, strict=True):
                    assert len(ids[mask].unique()) <= 1


def test_patches_are_closer_together_than_sets_at_random(folders):
    def spread(draw: str) -> float:
        loader = loaders(folders / "slice-dense", streaming=True, set_draw=draw, set_size=8)[0]
        result = [
            positions[mask].std(0)[:2].mean()
            for batch in loader
            for positions, mask in zip(batch.positions, batch.node_mask, strict=True)
            if mask.sum() > 2
        ]
        return float(torch.stack(result).mean())

    assert spread("patch") < 0.6 * spread("slice")


def test_streaming_slices_needs_the_slice_layout(folders):
    for draw in ("slice", "patch"):
        with pytest.raises(InputError, match="--layout slice"):
            loaders(folders / "shuffled-dense", streaming=True, set_draw=draw)


def test_the_buffer_mixes_cells_of_several_slices(folders):
    loader = loaders(folders / "slice-dense", streaming=True, buffer_size=200)[0]
    assert all(len(batch.slice_id.unique()) > 1 for batch in loader)


def test_an_empty_split_has_no_batches(tmp_path):
    source = write(tmp_path / "in", one=make_slice(30))
    run(source, tmp_path / "out", train_ratio=1.0, val_ratio=0.0)
    for streaming in (True, False):
        train, validation, test = loaders(tmp_path / "out", streaming=streaming)
        assert len(list(train)) == 1
        assert len(validation) == len(list(validation)) == len(list(test)) == 0


def test_a_batch_larger_than_the_split_is_padded(tmp_path):
    run(write(tmp_path / "in", one=make_slice(30)), tmp_path / "out")
    for streaming in (True, False):
        batch = next(iter(loaders(tmp_path / "out", batch_size=100, streaming=streaming)[0]))
        assert batch.expression.shape == (1, 100, 12)
        assert batch.node_mask.sum() == 24


def test_more_ranks_than_cells_give_masked_batches(tmp_path):
    run(write(tmp_path / "in", one=make_slice(10)), tmp_path / "out")
    for streaming in (True, False):
        seen = []
        for rank in range(3):
            validation = loaders(tmp_path / "out", rank=rank, world_size=3, streaming=streaming)[1]
            batches = list(validation)
            assert len(batches) == 1
            assert batches[0].expression.shape == (1, 32, 12)
            seen.extend(real_ids(batches))
        assert len(seen) == 1


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("change", ["flip", "truncate", "delete"])
def test_an_altered_shard_is_named_by_its_checksum(tmp_path, streaming, change):
    run(write(tmp_path / "in", one=make_slice(200)), tmp_path / "out")
    shard = tmp_path / "out/data/train.parquet"
    content = bytearray(shard.read_bytes())
    if change == "flip":
        content[len(content) // 3] ^= 4
    shard.unlink()
    if change != "delete":
        shard.write_bytes(content[: len(content) - 50 * (change == "truncate")])
    with pytest.raises(InputError) as caught:
        list(loaders(tmp_path / "out", streaming=streaming, num_workers=2)[0])
    assert "train.parquet" in str(caught.value)
    assert ("missing" if change == "delete" else "sha256") in str(caught.value)
    assert "\n" not in str(caught.value)
    if change == "truncate":
        with pytest.raises(InputError, match=r"train\.parquet: cannot be read"):
            list(loaders(tmp_path / "out", streaming=streaming, verify_checksums=False)[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 10, "set_size": 4}, "multiple of set_size"),
        ({"set_size": 64}, "multiple of set_size"),
        ({"buffer_size": 0}, "buffer_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"rank": 0}, "give both"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(folders, options, words):
    with pytest.raises(InputError, match=words):
        loaders(folders / "shuffled-dense", **options)


def test_a_folder_that_was_not_preprocessed_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"there is no metadata\.json"):
        loaders(tmp_path)
    with pytest.raises(InputError, match="there is no such folder"):
        loaders(tmp_path / "absent")
    (tmp_path / "metadata.json").write_text('{"format_version": 99}')
    with pytest.raises(InputError, match=r"metadata\.json: format_version"):
        loaders(tmp_path)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("draw", ["random", "slice"])
@pytest.mark.parametrize("rank", [0, 1])
def test_batches_of_cells_that_stay_on_a_device_are_those_of_the_table(folders, name, draw, rank):
    options = {"set_draw": draw, "set_size": 8, "rank": rank, "world_size": 2, "smooth": doubled}
    plain = loaders(folders / name, **options)
    resident = loaders(folders / name, device=torch.device("cpu"), **options)
    for one, two in zip(plain, resident, strict=True):
        for _ in range(2):  # epochs
            for expected, batch in zip(one, two, strict=True):
                assert same(batch, expected)
                assert torch.equal(batch.smoothed, expected.smoothed)
                assert torch.equal(batch.gene_mask, expected.gene_mask)
                facts = (batch.first_cells, batch.real_cells)
                assert facts == (expected.first_cells, expected.real_cells)


def test_cells_that_do_not_fit_are_copied_batch_by_batch(folders, monkeypatch):
    options = {"device": torch.device("cpu"), "set_draw": "slice", "set_size": 8}
    monkeypatch.setattr("alphastomics.preprocessing.resident.MOST_BYTES", 100)
    monkeypatch.setattr(DataHolder, "pin_memory", lambda self: self)
    monkeypatch.setattr("alphastomics.preprocessing.resident.ResidentCells.batch", None)
    expected = list(loaders(folders / "slice-dense", set_draw="slice", set_size=8)[0])
    found = list(loaders(folders / "slice-dense", **options)[0])
    assert all(same(one, two) for one, two in zip(found, expected, strict=True))


def doubled(expression: np.ndarray) -> np.ndarray:
    """Stand in for the smoothing of a slice."""
    return np.hstack([expression, 2 * expression]).astype(np.float32)


def test_loading_imports_neither_anndata_nor_scanpy(folders):
    code = (
        "import sys\n"
        "from alphastomics.preprocessing.batch_loader import create_dataloaders\n"
        f"list(create_dataloaders({str(folders / 'slice-sparse')!r}, batch_size=32)[0])\n"
        "assert not {'anndata', 'scanpy', 'h5py'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_preprocessing_imports_neither_torch_nor_anndata():
    code = (
        "import sys\n"
        "import alphastomics.preprocessing.commands\n"
        "assert not {'torch', 'anndata', 'scanpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
