"""What a run may replace, and when; what a refused or repeated run leaves as it is."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.diffusion_model.train import TrainRequest
from alphastomics.errors import InputError
from alphastomics.preprocessing.resume import with_checksum
from tests.diffusion_model.conftest import equal, logged, weights
from tests.diffusion_model.test_resume import Cut

LAST, OVER = TrainRequest(resume="last"), TrainRequest(overwrite=True)


def contents(folder: RunFolder) -> dict[str, str]:
    """Return the digest of every file of a run."""
    return {
        path.relative_to(folder.path).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.path.rglob("*"))
        if path.is_file()
    }


@contextmanager
def stopped_at(batch: int, error: BaseException) -> Iterator[None]:
    """Have training fail before its n-th batch, counted over all epochs."""
    original, seen = AlphaSTomicsModule.training_step, [0]

    def training_step(self, *args):
        if seen[0] == batch:
            raise error
        seen[0] += 1
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlphaSTomicsModule, "training_step", training_step)
        with pytest.raises(type(error)):
            yield


@pytest.mark.parametrize("error", [MemoryError("no room"), InputError("bad"), SystemExit(143)])
def test_an_overwritten_run_stays_until_the_new_one_has_a_checkpoint(run, tmp_path, error):
    before = contents(run("same"))
    with stopped_at(0, error):
        run("same", OVER, seed={"global_seed": 9})
    assert contents(RunFolder(tmp_path / "same")) == before


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"loading": {"streaming": True, "set_draw": "slice"}, "processed_data_dir": ""}},
        {"training": {"batch_size": 64}, "data": {"processed_data_dir": "lost"}},
    ],
    ids=["wrong layout", "lost shard"],
)
def test_overwriting_with_what_cannot_work_keeps_the_old_run(run, processed, tmp_path, sections):
    before = contents(run("same"))
    other = tmp_path / "data"
    shutil.copytree(processed, other)
    if sections["data"]["processed_data_dir"] == "lost":
        next((other / "data").glob("train*")).unlink()
    else:
        metadata = json.loads((other / "metadata.json").read_text())
        assert metadata["layout"] == "slice"
        shutil.rmtree(other)
        from tests.preprocessing.tissue import make_slice, write
        from tests.preprocessing.tissue import run as preprocess

        preprocess(write(tmp_path / "in", one=make_slice(200, 24)), other)
    sections["data"]["processed_data_dir"] = str(other)
    with pytest.raises(InputError):
        run("same", OVER, **sections)
    assert contents(RunFolder(tmp_path / "same")) == before


def test_another_run_is_not_replaced_by_resuming_into_its_folder(run):
    first, second = run("first"), run("second", seed={"global_seed": 5})
    before = contents(second)
    with pytest.raises(InputError, match="holds another run than"):
        run("second", TrainRequest(resume=str(first.last)), training={"max_epochs": 3})
    assert contents(second) == before
    run("third", TrainRequest(resume=str(first.last)), training={"max_epochs": 3})


REFUSED = {
    "seed": {"seed": {"global_seed": 7}},
    "batch size": {"training": {"batch_size": 32}},
    "fewer epochs": {"training": {"max_epochs": 1}},
    "time steps": {"diffusion": {"num_timesteps": 500}},
    "accumulation": {"training": {"accumulate_grad_batches": 2}},
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("cut", [None, 7], ids=["between epochs", "within an epoch"])
def test_a_refused_resume_writes_nothing(what, cut, run, tmp_path):
    if cut is None:
        run("run")
    else:
        with stopped_at(cut, Cut()):
            run("run")
    folder = RunFolder(tmp_path / "run")
    before = contents(folder)
    with pytest.raises(InputError):
        run("run", LAST, **REFUSED[what])
    assert contents(folder) == before


def test_a_resume_on_other_data_is_refused_between_epochs_too(run, processed, tmp_path):
    folder = run("run")
    before = contents(folder)
    other = tmp_path / "data"
    shutil.copytree(processed, other)
    metadata = json.loads((other / "metadata.json").read_text())
    metadata["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    (other / "metadata.json").write_text(json.dumps(with_checksum(metadata)))
    sections = {"training": {"max_epochs": 3}, "data": {"processed_data_dir": str(other)}}
    with pytest.raises(InputError, match="its run has data"):
        run("run", LAST, **sections)
    assert contents(folder) == before


@pytest.mark.parametrize("batch", [1, 5])
def test_a_run_cut_between_two_updates_resumes_to_the_same_bits(batch, run):
    sections = {"training": {"accumulate_grad_batches": 3, "max_epochs": 3}}
    whole = run("whole", **sections)
    with stopped_at(batch, Cut()):
        run("cut", **sections)
    resumed = run("cut", LAST, **sections)
    assert equal(weights(resumed), weights(whole))
    assert logged(resumed) == logged(whole)


def test_a_run_that_stopped_early_is_not_trained_on_when_it_is_given_again(run):
    # So small a rate changes no weight, and so no validation is better than the first.
    sections = {"training": {"max_epochs": 9, "patience": 2, "learning_rate": 1e-30}}
    first = run("early", **sections)
    before, steps = weights(first), json.loads((first.path / "status.json").read_text())["step"]
    assert steps < 9 * 4
    again = run("early", LAST, **sections)
    assert equal(weights(again), before)
    assert json.loads((again.path / "status.json").read_text())["step"] == steps


def test_an_overwritten_run_that_is_interrupted_leaves_no_old_export(run, monkeypatch):
    from alphastomics.diffusion_model.callbacks import StopOnRequest

    folder = run("same")
    assert (folder.path / "export/model.safetensors").is_file()
    original = StopOnRequest.on_train_start

    def at_once(self, trainer, pl_module):
        original(self, trainer, pl_module)
        self.received = 15

    monkeypatch.setattr(StopOnRequest, "on_train_start", at_once)
    with pytest.raises(SystemExit):
        run("same", OVER)
    assert not (folder.path / "export").exists()
    assert folder.last.is_file()
    assert not folder.replaced.exists()


def test_a_users_own_files_in_the_run_folder_survive_overwriting(run):
    folder = run("same")
    mine = [folder.checkpoints / "mine.ckpt", folder.path / "export/notes.txt"]
    for path in mine:
        path.write_text("mine")
    run("same", OVER)
    assert [path.read_text() for path in mine] == ["mine", "mine"]


def killed_after(moves: int | None, step: Callable[[], None]) -> None:
    """Stop before a move of a file, as `kill -9` might."""
    done, original = [], Path.replace

    def replace(self: Path, target: Path) -> Path:
        if len(done) == moves:
            raise Cut
        done.append(target)
        return original(self, target)

    with pytest.MonkeyPatch.context() as patch, suppress(Cut):
        patch.setattr(Path, "replace", replace)
        step()


def test_a_run_killed_while_it_replaced_another_brings_that_one_back(run, tmp_path: Path):
    whole = run("same")
    before = contents(whole)
    for aside in (1, 2, 5, None):
        for back in (0, 1, 4, None):
            folder = RunFolder(tmp_path / f"{aside}-{back}")
            shutil.copytree(whole.path, folder.path)
            killed_after(aside, folder.set_aside)
            if aside is None:
                folder.mark("running")
            killed_after(back, folder.recover)
            folder.recover()
            assert contents(folder) == before, (aside, back)
    whole.set_aside()
    with pytest.raises(InputError, match="holds a run already"):
        run("same")
    assert contents(whole) == before


def test_an_altered_summary_of_a_run_is_not_relied_on(run):
    from alphastomics.diffusion_model.run_folder import best_checkpoint

    folder = run("run")
    path = folder.path / "report.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "best_checkpoint": "epoch0009-step0000001.ckpt"}))
    with pytest.raises(InputError, match=r"report\.json: damaged"):
        best_checkpoint(folder)
