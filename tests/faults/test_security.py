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
from alphastomics.errors import InputError
from alphastomics.io.files import replacing, write_text
from tests.faults.conftest import Tiny
from tests.faults.door import refused, require_no_accident
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
    refused(door("sample", *model, *given, "--output", "made.h5ad"), "linked.h5ad", "obsm")
    assert victim.read_bytes() == before


def external_link(file: h5py.File, secret: Path) -> None:
    with h5py.File(secret.with_suffix(".h5"), "w") as other:
        other["token"] = np.frombuffer(secret.read_bytes(), np.uint8)
    file["uns/token"] = h5py.ExternalLink(secret.with_suffix(".h5"), "/token")


def external_storage(file: h5py.File, secret: Path) -> None:
    size = secret.stat().st_size
    file.create_dataset("uns/token", (size,), np.uint8, external=[(str(secret), 0, size)])


def external_counts(file: h5py.File, secret: Path) -> None:
    values = file["X/data"] if isinstance(file["X"], h5py.Group) else file["X"]
    where, shape, kind = values.name, values.shape, values.dtype
    del file[where]
    size = int(np.prod(shape)) * kind.itemsize
    secret.write_bytes(bytes(size))
    file.create_dataset(where, shape, kind, external=[(str(secret), 0, size)])


def virtual_dataset(file: h5py.File, secret: Path) -> None:
    with h5py.File(secret.with_suffix(".h5"), "w") as other:
        other["token"] = np.frombuffer(secret.read_bytes(), np.uint8)
    shape = (secret.stat().st_size,)
    layout = h5py.VirtualLayout(shape, np.uint8)
    layout[:] = h5py.VirtualSource(secret.with_suffix(".h5"), "token", shape)
    file.create_virtual_dataset("uns/token", layout)


LEAKS = [external_link, external_storage, external_counts, virtual_dataset]


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
@pytest.mark.parametrize("command", ["preprocess", "sample", "extract"])
def test_a_file_that_shows_another_is_refused(command, leak, tiny: Tiny, door, sandbox, work):
    secret = sandbox / "outside/secret.key"
    secret.write_text(TOKEN)
    path = work / "in/slice.h5ad"
    path.parent.mkdir()
    path.write_bytes(tiny.slice.read_bytes())
    with h5py.File(path, "r+") as file:
        leak(file, secret)
    lines = {
        "preprocess": ("--input_dir", "in", "--output_dir", "out"),
        "sample": ("--checkpoint", tiny.checkpoint, "--input_data", path, "--output", "o.h5ad"),
        "extract": ("--checkpoint", tiny.checkpoint, "--input_data", path, "--output", "o.h5ad"),
    }
    refused(door(command, *lines[command], "--config", tiny.config), "slice.h5ad", "output")


@pytest.mark.parametrize("target", ["outside/precious.txt", "nowhere"])
def test_a_zarr_chunk_that_is_a_link_is_refused(target, tiny: Tiny, door, sandbox, work):
    pytest.importorskip("zarr")
    import anndata

    store = work / "in/slice.zarr"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anndata.read_h5ad(tiny.slice).write_zarr(store)
    chunk = next(path for path in sorted(store.rglob("*")) if path.name[0].isdigit())
    if chunk.is_dir():
        chunk = next(path for path in sorted(chunk.rglob("*")) if path.is_file())
    chunk.unlink()
    chunk.symlink_to(sandbox / target)
    said = "symbolic link" if target != "nowhere" else "slice.zarr"
    refused(door("preprocess", "--input_dir", "in", "--output_dir", "out"), said)


ECHOES = [f"bad token {TOKEN}", f"Authorization: Bearer {TOKEN}", "x" * 290 + TOKEN, f"\n{TOKEN}\n"]


@pytest.mark.parametrize("echo", ECHOES, ids=range(len(ECHOES)))
def test_a_hub_that_echoes_the_token_gets_it_shown_nowhere(echo, monkeypatch, capsys):
    from alphastomics.io.hub import explained
    from alphastomics.main import say
    from alphastomics.preprocessing.folder import DataFolder

    class Far:
        def cat_file(self, name: str) -> bytes:
            raise OSError(echo)

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = DataFolder("memory://somewhere")
    folder._remote = Far()
    with pytest.raises(InputError) as caught:
        folder.read_bytes("metadata.json")
    assert caught.value.__cause__ is None
    said = [str(caught.value), explained(OSError(echo), "a/b", "there", writing=True)]
    error = OSError(echo)
    error.server_message = echo
    error.response = type("Response", (), {"status_code": 400})()
    said.append(explained(error, "a/b", "there", writing=True))
    say(echo, 1, show_traceback=True)
    for text in (*said, capsys.readouterr().err):
        assert TOKEN[:8] not in text


def test_a_temporary_file_is_new_and_its_name_cannot_be_guessed(tmp_path, monkeypatch):
    names = []
    for _ in range(2):
        with replacing(tmp_path / "out.txt") as partial:
            names.append(partial.name)
            partial.write_text("new")
    assert names[0] != names[1]
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("alphastomics.io.files.secrets.token_hex", lambda _: "known")
    (tmp_path / ".out.txt.known.partial").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "out.txt", "bad")
    assert victim.read_text() == "precious"
