"""Models as plain folders: saved, loaded, sent to the Hub and fetched from it, never pickled."""

import json
import re
import shutil
from pathlib import Path

import anndata
import numpy as np
import pytest
import torch
import yaml

from alphastomics import AlphaSTomics
from alphastomics.diffusion_model.hub_model import write_model
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.errors import InputError
from alphastomics.main import main
from tests.api.conftest import TINY
from tests.preprocessing.hub_server import REPO, TOKEN, served

pytest.importorskip("huggingface_hub")
# The client's own way of calling its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

FILES = {"README.md", "config.json", "model.safetensors", "record.json"}


@pytest.fixture
def server(monkeypatch, tmp_path):
    with served(monkeypatch, tmp_path) as result:
        yield result


@pytest.fixture(scope="module")
def run_folder(slice_files: Path, tmp_path_factory) -> Path:
    """A finished run, scored, as the command line leaves it."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(yaml.safe_dump(TINY))
    config = ["--config", folder / "config.yaml"]
    processed = ["--data_dir", folder / "processed"]
    generated = ["--input_dir", slice_files, "--output_dir", folder / "processed", *config]
    for words in (
        ["preprocess", *generated, "--train_ratio", 0.6],
        ["train", *processed, "--output_dir", folder, "--exp_name", "run", *config],
    ):
        assert main(list(map(str, words))) == 0
    best = json.loads((folder / "run/report.json").read_text())["best_checkpoint"]
    assert main(list(map(str, ["test", "--checkpoint", best, *processed, *config]))) == 0
    return folder / "run"


def card_of(text: str) -> tuple[dict, str]:
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_a_saved_model_says_the_same_as_before(model, slices, tmp_path):
    assert model.save(tmp_path / "kept") == tmp_path / "kept"
    assert {path.name for path in (tmp_path / "kept").iterdir()} == FILES
    for again in (
        AlphaSTomics.load(tmp_path / "kept"),
        AlphaSTomics.from_pretrained(tmp_path / "kept"),
    ):
        np.testing.assert_array_equal(
            again.predict_positions(slices[0].copy()), model.predict_positions(slices[0].copy())
        )
        assert again.genes == model.genes
        assert again.config.sampling == model.config.sampling


def test_where_the_counts_were_is_remembered(slices, tmp_path):
    for adata in slices:
        adata.layers["counts"] = adata.X
        adata.X = None
        AlphaSTomics.setup_anndata(adata, layer="counts", cell_type_key="cell_type")
    AlphaSTomics(slices, TINY).train(1).save(tmp_path / "kept")
    again = AlphaSTomics.load(tmp_path / "kept")
    cells = anndata.AnnData(obs=slices[0].obs, var=slices[0].var, layers=slices[0].layers)
    assert again.predict_positions(cells).shape == (90, 2)
    with pytest.raises(InputError, match=r"adata: layers\['counts'\] is missing"):
        again.predict_positions(anndata.AnnData(slices[0].layers["counts"], var=slices[0].var))


def test_a_model_folder_serves_the_commands_as_a_checkpoint_does(model, slice_files, tmp_path):
    model.save(tmp_path / "kept")
    words = ["sample", "--checkpoint", tmp_path / "kept", "--sample_mode", "expr_to_pos"]
    words += ["--input_data", slice_files / "slice_0.h5ad", "--output", tmp_path / "out.h5ad"]
    words += ["--num_steps", 3, "--num_samples", 2]
    assert main(list(map(str, words))) == 0
    expected = model.predict_positions(anndata.read_h5ad(slice_files / "slice_0.h5ad"))
    generated = anndata.read_h5ad(tmp_path / "out.h5ad")
    np.testing.assert_array_equal(generated.obsm["spatial_pred"], expected)


def test_a_folder_that_is_in_use_is_kept_unless_overwrite(model, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        model.save(tmp_path)
    model.save(tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"mine.txt"}
    with pytest.raises(InputError, match="is a file"):
        model.save(tmp_path / "mine.txt")


def test_a_folder_that_cannot_be_created_is_one_line(model):
    with pytest.raises(InputError, match=r"^/proc/none: cannot be created .* another folder$"):
        model.save("/proc/none")


def test_what_was_altered_is_refused(model, tmp_path):
    def altered(name: str, change) -> Path:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        model.save(folder)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        return folder

    flipped = altered("model.safetensors", lambda c: c[:-9] + bytes([c[-9] ^ 1]) + c[-8:])
    with pytest.raises(InputError, match="altered since it was written"):
        AlphaSTomics.load(flipped)
    with pytest.raises(InputError, match="truncated or damaged"):
        AlphaSTomics.load(altered("model.safetensors", lambda c: c[: len(c) // 2]))
    with pytest.raises(InputError, match=r"config\.json: damaged: not JSON"):
        AlphaSTomics.load(altered("config.json", lambda c: c[:40]))
    with pytest.raises(InputError, match=r"record\.json: damaged: not JSON"):
        AlphaSTomics.load(altered("record.json", lambda c: b"{"))
    with pytest.raises(InputError, match="differs from its checksum"):
        AlphaSTomics.load(
            altered("config.json", lambda c: c.replace(b'"d_model": 16', b'"d_model": 32'))
        )
    missing = altered("config.json", lambda c: c)
    (missing / "config.json").unlink()
    with pytest.raises(InputError, match="is missing beside"):
        AlphaSTomics.load(missing)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        AlphaSTomics.load(tmp_path / "none")
    with pytest.raises(InputError, match="is a folder, and of no model"):
        AlphaSTomics.load(tmp_path)
    with pytest.raises(InputError, match="no name on the Hub"):
        AlphaSTomics.from_pretrained(tmp_path / "none")


def test_a_loaded_model_says_what_it_lacks(model, tmp_path):
    again = AlphaSTomics.load(model.save(tmp_path / "kept"))
    with pytest.raises(InputError, match="no slices"):
        again.train()
    with pytest.raises(InputError, match="give an AnnData"):
        again.evaluate()


def test_the_card_shows_the_runs_real_figures(model, slices, tmp_path):
    scores = model.evaluate(slices[0])
    head, body = card_of((model.save(tmp_path / "kept", license="mit") / "README.md").read_text())
    assert head["license"] == "mit"
    assert head["library_name"] == "alphastomics"
    methods = ("alphastomics", "alphastomics sample", "shuffled")
    result = [scores["expr_to_pos"][method]["knn_preservation"] for method in methods]
    row = next(line for line in body.splitlines() if line.startswith(r"| knn\_preservation"))
    assert row.startswith(r"| knn\_preservation | " + " | ".join(f"{v:.4g}" for v in result))
    loss = model._trained().record["training"]["best_val_loss"]
    assert f"| best_val_loss | {loss:.4g} |" in body
    assert f"{len(model.genes)} genes" in body


def test_the_card_says_how_training_judged_the_model(model, tmp_path):
    verdict = {"held_out": "slice s_1", "sentences": ["positions: level <b>", "long " * 40]}
    trained = model._trained()
    judged = trained._replace(record={"training": {}, "verdict": verdict})
    write_model(tmp_path, judged, "mine", {"license": "mit"})
    _, body = card_of((tmp_path / "README.md").read_text())
    said = (
        "By what training held out (slice s\\_1):\n\n- positions\\: level \\<b\\>\n- long "
        + "long " * 38
        + "long\n"
    )
    assert said in body
    assert "None yet" not in body


def test_a_model_travels_over_the_hub(server, model, slices):
    address = model.push_to_hub(REPO, token=TOKEN, license="mit", private=True)
    assert address == f"{server.url}/{REPO}"
    assert set(server.files) == FILES
    assert server.created[0]["visibility"] == "private"
    again = AlphaSTomics.from_pretrained(REPO, token=TOKEN)
    np.testing.assert_array_equal(
        again.predict_positions(slices[0].copy()), model.predict_positions(slices[0].copy())
    )
    head, body = card_of(server.files["README.md"].decode())
    assert head["license"] == "mit"
    assert f'from_pretrained("{REPO}")' in body


def test_a_public_model_needs_no_login_and_the_cache_no_network(server, model, monkeypatch):
    model.push_to_hub(REPO, token=TOKEN)
    server.welcome = {None}
    assert AlphaSTomics.from_pretrained(REPO).genes == model.genes
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert AlphaSTomics.from_pretrained(REPO).genes == model.genes


def test_weights_and_config_alone_are_a_model(server, model, slices):
    model.push_to_hub(REPO, token=TOKEN)
    del server.files["record.json"]
    again = AlphaSTomics.from_pretrained(REPO, token=TOKEN)
    np.testing.assert_array_equal(
        again.predict_positions(slices[0].copy()), model.predict_positions(slices[0].copy())
    )


def test_a_model_that_the_hub_lacks_is_one_line(server, model):
    model.push_to_hub(REPO, token=TOKEN)
    del server.files["model.safetensors"]
    with pytest.raises(InputError, match="knows no such") as caught:
        AlphaSTomics.from_pretrained(REPO, token=TOKEN)
    assert "\n" not in str(caught.value)
    wrong = "hf_someOtherSecret999"
    with pytest.raises(InputError, match="refused the token") as caught:
        AlphaSTomics.from_pretrained(REPO, token=wrong, revision="other")
    assert wrong not in str(caught.value)
    server.cut = {"resolve"}
    with pytest.raises(InputError, match=r"connection to .* failed: check the network"):
        AlphaSTomics.from_pretrained(REPO, token=TOKEN, revision="another")


def upload(path: Path, *more: str) -> int:
    words = ["upload", "--checkpoint", str(path), "--repo_id", REPO, "--token", TOKEN]
    return main([*words, *more])


def test_the_command_sends_a_run_a_checkpoint_or_a_folder(server, run_folder, capsys):
    report = json.loads((run_folder / "report.json").read_text())
    sent = []
    for path in (run_folder, Path(report["best_checkpoint"]), run_folder / "export"):
        server.files = {}
        assert upload(path, "--license", "mit") == 0
        assert capsys.readouterr().out == f"{server.url}/{REPO}\n"
        assert set(server.files) == FILES
        sent.append(dict(server.files))
    assert sent[0] == sent[1]
    assert sent[2]["model.safetensors"] == sent[0]["model.safetensors"]
    run, exported = (json.loads(files["record.json"]) for files in (sent[0], sent[2]))
    assert exported["training"]["best_val_loss"] == report["best_val_loss"]
    assert exported["training"] == run["training"]
    _, body = card_of(sent[0]["README.md"].decode())
    assert f"| best_val_loss | {report['best_val_loss']:.4g} |" in body
    assert "ExtraTrees" in body
    assert "spatial k-NN mean" in body
    _, bare = card_of(sent[2]["README.md"].decode())
    assert "None yet" in bare


def test_figures_of_the_best_checkpoint_are_not_given_to_another(server, run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "moved")
    assert upload(RunFolder(tmp_path / "moved").last) == 0
    assert set(json.loads(server.files["record.json"])) == {"record_sha256"}
    assert upload(tmp_path / "moved") == 0
    assert "training" in json.loads(server.files["record.json"])


def test_what_is_no_model_is_refused_before_anything_is_sent(server, tmp_path, capsys):
    torch.save({"a": torch.zeros(2)}, tmp_path / "other.ckpt")
    for path, words in {
        tmp_path: "is a folder, and of no model",
        tmp_path / "other.ckpt": "not a checkpoint of AlphaSTomics",
        tmp_path / "none.ckpt": "no such checkpoint",
    }.items():
        assert upload(path) == 2
        assert words in capsys.readouterr().err
    assert server.calls == []


def test_the_missing_extra_is_named(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=re.escape("pip install 'alphastomics[hub]'")):
        model.push_to_hub(REPO, token=TOKEN)
