"""Nothing that a user is given runs code, tells a secret, or writes where it has no business."""

import ast
import json
import pickle
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest

import alphastomics
from tests.faults.conftest import Tiny
from tests.faults.door import done, refused, require_no_accident
from tests.faults.test_checkpoints import Payload

PACKAGE = Path(alphastomics.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
# Modules that run what they read.
BARRED_MODULES = {"joblib", "dill", "cloudpickle", "shelve", "marshal", "_pickle"}
# Where the name of pickle's error is needed, to refuse what it refuses.
MAY_NAME_PICKLE = {"diffusion_model/checkpoint.py"}
BARRED_CALLS = {"eval", "exec", "__import__", "compile"}
BARRED_ENDS = ("read_pickle", "to_pickle", "unsafe_load", "full_load")


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """List the calls of a module with their names, as `torch.load`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def keyword(node: ast.Call, name: str) -> object:
    return next((ast.unparse(word.value) for word in node.keywords if word.arg == name), None)


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_no_module_unpickles():
    for path in SOURCES:
        for name, node in calls(path):
            where = f"{relative(path)}: {name}"
            if name == "torch.load":
                assert keyword(node, "weights_only") == "True", where
            if name in ("np.load", "numpy.load"):
                assert keyword(node, "allow_pickle") in (None, "False"), where
            if name == "yaml.load":
                assert keyword(node, "Loader") == "ConfigLoader", where
            assert not name.startswith("pickle."), where
            assert name not in BARRED_CALLS, where
            assert not name.endswith(BARRED_ENDS), where


def test_no_module_imports_what_runs_files():
    for path in SOURCES:
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
        barred = BARRED_MODULES | (set() if relative(path) in MAY_NAME_PICKLE else {"pickle"})
        assert found.isdisjoint(barred), relative(path)


def test_a_payload_in_the_arrays_of_a_folder_is_never_run(tiny, door, own_processed, work):
    mark = work / "mark"
    for storage in ("dense", "sparse"):
        metadata = json.loads((own_processed / "metadata.json").read_text())
        metadata["storage"] = storage
        (own_processed / "metadata.json").write_text(json.dumps(metadata))
        np.savez(own_processed / "scaling.npz", mean=np.array([Payload(mark)], dtype=object))
        outcome = door("train", "--config", tiny.config, "--data_dir", own_processed)
        require_no_accident(outcome)
        assert not mark.exists()


def test_a_payload_in_a_zarr_store_is_never_run(tiny, door, work):
    pytest.importorskip("zarr")
    import anndata

    mark = work / "mark"
    store = work / "in/evil.zarr"
    data = anndata.read_h5ad(tiny.slice)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data.write_zarr(store)
    target = store / "var/_index"
    for old in target.rglob("*"):
        if old.is_file():
            old.unlink()
    fields = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "compressor": None}
    codecs = [{"id": "vlen-utf8"}, {"id": "pickle", "protocol": 4}]
    described = {**fields, "fill_value": None, "order": "C", "filters": codecs}
    (target / ".zarray").write_text(json.dumps(described))
    (target / "0").write_bytes(pickle.dumps(np.array([Payload(mark)], dtype=object)))
    refused(door("preprocess", "--input_dir", store.parent, "--output_dir", "out"))
    assert not mark.exists()


@pytest.mark.parametrize(
    "line",
    [
        "upload --data_dir {processed} --repo_id a/b --token {token}",
        "upload --data_dir {processed} --repo_id a/b --token {token} --verbose",
        "upload --checkpoint {run} --repo_id a/b --token {token}",
        "upload --data_dir nowhere --repo_id a/b --token {token}",
        "upload --data_dir {processed} --repo_id nonsense --token {token}",
        "upload --data_dir {processed} --repo_id a/b --token {token}é",
        "upload --data_dir {processed} --repo_id a/b --tokn={token}",
        "upload --data_dir {processed} --repo_id a/b --tokn {token}",
        "upload --data_dir {processed} --repo_id a/b --license {token} --token {token}",
        "train --token={token}",
    ],
)
def test_a_token_is_never_told(line, tiny: Tiny, door, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    # A port that nobody listens at: the connection fails at once.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    places = {"processed": tiny.processed, "run": tiny.run, "token": TOKEN}
    outcome = door(*line.format(**places).split())
    assert outcome.status == 2
    assert TOKEN not in outcome.err
    assert TOKEN not in outcome.out


def test_a_link_inside_an_h5ad_never_leads_writing_to_another_file(tiny, door, work):
    """The copy that extract writes into must not be a door to another file."""
    victim = work.parent / "outside/victim.h5"
    with h5py.File(tiny.slice, "r") as source, h5py.File(victim, "w") as other:
        source.copy("obsm", other)
    before = victim.read_bytes()
    path = work / "linked.h5ad"
    path.write_bytes(tiny.slice.read_bytes())
    with h5py.File(path, "r+") as file:
        del file["obsm"]
        file["obsm"] = h5py.ExternalLink(str(victim), "/obsm")
    model = ("--checkpoint", tiny.checkpoint, "--config", tiny.config)
    given = ("--input_data", path)
    refused(door("extract", *model, *given, "--output", "made.h5ad"), "linked.h5ad", "obsm")
    done(door("sample", *model, *given, "--output", "made.h5ad"))
    assert victim.read_bytes() == before
