"""Two processes that write to one place: one wins or one is refused, never a mixture."""

import multiprocessing
import shutil
from pathlib import Path

import pytest

from alphastomics.io.files import locked
from tests.faults.children import digests, ended, start
from tests.faults.conftest import Tiny
from tests.faults.door import done, refused


def folders(tiny: Tiny) -> dict[str, list[object]]:
    slices, listed = ["--input_dir", tiny.slices], ["--gene_list_file", tiny.genes]
    train = ["train", "--config", tiny.config, "--output_dir", ".", "--exp_name", "out"]
    return {
        "simulate": ["simulate", "--output_dir", "out", "--cells", 30, "--genes", 20],
        "preprocess": ["preprocess", *slices, "--output_dir", "out"],
        "stage1": ["stage1", *slices, *listed, "--output_dir", "out"],
        "stage2": ["stage2", "--input_dirs", tiny.stage1, "--output_dir", "out"],
        "train": train,
        "train resumed": [*train, "--resume", "last"],
        "train over it": [*train, "--overwrite"],
    }


@pytest.mark.parametrize("name", folders(Tiny(Path())))
def test_a_folder_that_another_process_writes_is_refused(name, tiny, door, work):
    (work / "out").mkdir()
    with locked(work / "out"):
        refused(door(*folders(tiny)[name]), "out: another process is writing there")
    done(door(*folders(tiny)[name]))


def hold(path: Path, ready, leave) -> None:
    with locked(path):
        ready.set()
        leave.wait(60)


def test_the_lock_ends_with_its_process_however_that_ends(tiny, door, work):
    (work / "out").mkdir()
    context = multiprocessing.get_context("spawn")
    ready, leave = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(work / "out", ready, leave))
    holder.start()
    assert ready.wait(60)
    refused(door(*folders(tiny)["preprocess"]), "another process is writing there")
    holder.kill()
    holder.join()
    done(door(*folders(tiny)["preprocess"]))


def test_two_at_once_one_wins_and_the_result_is_one_of_theirs(tiny, work):
    """Both start together with other settings, so a mixture would show."""
    argv = folders(tiny)["preprocess"]
    both = [start(*argv, "--seed", seed, cwd=work) for seed in (1, 2)]
    statuses = [ended(process)[0] for process in both]
    assert sorted(statuses) in ([0, 2], [0, 0]), statuses
    assert statuses.count(0) == 1, "two requests that differ cannot both be answered in one folder"
    found = digests(work / "out", "data/*", "metadata.json")
    shutil.rmtree(work / "out")
    process = start(*argv, "--seed", 1 + statuses.index(0), cwd=work)
    assert ended(process)[0] == 0
    assert digests(work / "out", "data/*", "metadata.json") == found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sample", "extract"])
def test_two_that_write_one_file_leave_one_whole_file(name, tiny, work):
    model = ["--checkpoint", tiny.checkpoint, "--config", tiny.config]
    argv = {
        "sample": ["sample", *model, "--input_data", tiny.slice, "--output", "made.h5ad"],
        "extract": ["extract", *model, "--data_dir", tiny.processed, "--output", "made.npz"],
    }[name]
    both = [start(*argv, "--seed", seed, cwd=work) for seed in (1, 2)]
    statuses = [ended(process)[0] for process in both]
    assert 0 in statuses
    assert set(statuses) <= {0, 2}
    found = digests(work, "made.*")
    theirs = []
    for seed in (1, 2):
        (work / str(seed)).mkdir()
        assert ended(start(*argv, "--seed", seed, cwd=work / str(seed)))[0] == 0
        theirs.append(digests(work / str(seed), "made.*"))
    assert found in theirs
