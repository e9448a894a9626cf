"""Many samples, slices and files: time grows with their number, memory does not."""

import weakref

import numpy as np
import pytest

from tests.faults.conftest import Tiny
from tests.preprocessing.tissue import cells_of, make_slice, run, write


def most_samples_alive(num_samples: int, module, cells) -> int:
    """Generate, and count how many samples were in memory at once."""
    from alphastomics.config import SamplingConfig
    from alphastomics.generation.generate import generate
    from alphastomics.generation.slices import SliceSampler

    living: list[weakref.ref] = []
    most = 0
    original = SliceSampler.sample

    def counted(self, *args):
        nonlocal most
        sampled = original(self, *args)
        living.append(weakref.ref(sampled.cells.position))
        most = max(most, sum(sample() is not None for sample in living))
        return sampled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SliceSampler, "sample", counted)
        settings = SamplingConfig(num_steps=2, num_samples=num_samples)
        generate(module, cells, "expr_to_pos", settings, 1)
    return most


def test_generating_keeps_few_samples_in_memory_however_many_are_asked_for(tiny: Tiny):
    from alphastomics.generation.cells import Blank, blank_cells
    from alphastomics.generation.commands import load_for_use

    module, genes = load_for_use(tiny.checkpoint)
    cells = blank_cells(Blank(50), len(genes), dims=2)
    assert most_samples_alive(4, module, cells) == most_samples_alive(12, module, cells) <= 3


def test_layout_slice_opens_only_the_parts_that_hold_a_bucket(tmp_path, monkeypatch):
    import pyarrow as pa

    slices = {f"s{number:02d}": make_slice(20, 12, number) for number in range(12)}
    source = write(tmp_path / "in", **slices)
    opened = []
    original = pa.ipc.open_file

    def counted(*args):
        opened.append(args)
        return original(*args)

    monkeypatch.setattr(pa.ipc, "open_file", counted)
    run(source, tmp_path / "out", layout="slice")
    assert len(cells_of(tmp_path / "out")) == 240
    # Each part once to be sorted, and once for each split of its slice; not once for each shard.
    assert len(opened) <= 12 + 3 * 12


def test_statistics_of_many_small_slices_take_little_memory_and_disk(tmp_path):
    names = [f"slice{number:04d}" for number in range(150)]
    data = make_slice(300, 4000, 1, slices=names)
    counts = np.zeros(data.shape, np.float32)
    counts[np.arange(300), np.arange(300) * 13 % 4000] = 5
    data.X = counts
    source = write(tmp_path / "in", only=data)
    run(source, tmp_path / "out", storage="sparse")
    dense_bytes = len(names) * 4000 * 8 * 2
    assert (tmp_path / "out/scaling.npz").stat().st_size < dense_bytes / 20
    statistics = tmp_path / "out/_intermediate_slices/statistics.npz"
    assert statistics.stat().st_size < dense_bytes / 20
    with np.load(tmp_path / "out/scaling.npz") as scaling:
        assert scaling["mean"].shape == scaling["std"].shape
        assert scaling["mean"].shape[1] == 4000


def test_moments_of_slices_survive_writing_and_reading(tmp_path):
    from alphastomics.io.files import sha256_of
    from alphastomics.preprocessing.normalize import Moments
    from alphastomics.preprocessing.scaling import NOTHING, Compact, read_moments, write_moments

    rng = np.random.default_rng(0)
    values = rng.poisson(0.3, (2, 30)).astype(float)
    whole = [Moments(4, row, row**2) for row in values]
    path = tmp_path / "moments.npz"
    digest = write_moments(path, [Compact.of(moments) for moments in whole])
    assert digest == sha256_of(path)
    back = read_moments(path)
    for moments, found in zip(whole, back, strict=True):
        again = NOTHING.joined(found, 30).whole(30)
        assert again.count == moments.count
        assert np.array_equal(again.mean, moments.mean)
        assert np.array_equal(again.squares, moments.squares)


def test_where_slices_lie_equals_cutting_the_row_groups_for_each(tmp_path):
    from alphastomics.preprocessing import order
    from alphastomics.preprocessing.batch_loader import create_dataloaders

    data = make_slice(400, 12, 1, slices=["a", "b", "c", "d"])
    settings = {"layout": "slice", "max_shard_size": 90, "max_cells_per_file": 30}
    run(write(tmp_path / "in", only=data), tmp_path / "out", **settings)
    training, *_ = create_dataloaders(
        tmp_path / "out", batch_size=16, streaming=True, set_draw="slice", num_workers=0
    )
    reader = training.reader
    for number in range(4):
        expected = []
        for place, shard in enumerate(reader.shards):
            groups = [piece for piece in reader.pieces if piece.shard == place]
            first = 0
            for slice_number, cells in shard.slices:
                if slice_number == number:
                    expected += order.cut(groups, first, first + cells)
                first += cells
        assert training.source.pieces_of(number) == expected
