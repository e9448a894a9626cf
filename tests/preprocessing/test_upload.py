"""Upload: the real client against a server here that speaks the Hub's calls."""

import hashlib
import json
import logging
import re
import sys
from pathlib import Path

import pytest
import yaml

from alphastomics.errors import InputError
from alphastomics.io.hub import hidden_in_logs, licence_of
from alphastomics.main import main
from alphastomics.preprocessing import upload as room
from alphastomics.preprocessing.schema import parse_metadata
from tests.preprocessing.hub_server import REPO, TOKEN, served
from tests.preprocessing.tissue import files_in, make_slice, metadata_of, run, write

pytest.importorskip("huggingface_hub")
# The client's own way of calling its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

NASTY = "x|<b>`[a](http://e.vil)"


@pytest.fixture
def server(monkeypatch, tmp_path):
    with served(monkeypatch, tmp_path) as result:
        yield result


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("upload")
    genes = [NASTY, "- yaml: *bad", *(f"g{i}" for i in range(30))]
    types = ["T|cell", "# heading\n\n<script>", "plain"]
    write(
        root / "in",
        one=make_slice(90, genes, seed=1, slices=[NASTY, "two"], types=types),
        three=make_slice(50, genes, seed=2, types=types),
    )
    run(root / "in", root / "out", max_shard_size=60, cell_type_key="cell_type")
    return root / "out"


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A processed folder with other things of the user's in it."""
    copy = tmp_path / "processed"
    for name in files_in(made):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((made / name).read_bytes())
    for name in ("README.md", "notes.txt", "data/extra.parquet", "data/train.parquet.bak", ".env"):
        (copy / name).write_text("mine alone")
    return copy


def uploaded(folder: Path, *more: str, token: str = TOKEN) -> int:
    words = ["upload", "--data_dir", str(folder), "--repo_id", REPO, "--token", token]
    return main([*words, *more])


def own_files(folder: Path) -> set[str]:
    splits = metadata_of(folder)["splits"].values()
    shards = {shard["file"] for split in splits for shard in split["shards"]}
    return shards | {"metadata.json", "scaling.npz"}


def refusal(capsys, *words: str) -> str:
    """Read the one line of a refusal; the token is nowhere."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert TOKEN not in captured.err
    assert "Traceback" not in captured.err
    line = captured.err.splitlines()[-1]
    assert line.startswith("alphastomics: ")
    for word in words:
        assert word in line, line
    return line


def test_exactly_the_datasets_own_files_arrive_as_they_are(server, folder, capsys):
    before = {name: (folder / name).read_bytes() for name in files_in(folder)}
    assert "_intermediate_slices" in {name.partition("/")[0] for name in before}
    assert uploaded(folder) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{server.url}/datasets/{REPO}\n"
    assert TOKEN not in captured.err
    assert set(server.files) == own_files(folder) | {"README.md"}
    for name in own_files(folder):
        assert server.files[name] == before[name]
    assert server.files["README.md"] != before["README.md"]
    assert {name: (folder / name).read_bytes() for name in files_in(folder)} == before
    asked = {"name": "brain-atlas", "organization": "somebody", "type": "dataset"}
    assert server.created == [asked]


def test_a_second_upload_sends_only_what_is_missing(server, folder):
    assert uploaded(folder) == 0
    assert uploaded(folder) == 0
    puts = len(own_files(folder)) - 1
    assert server.calls.count("put") == puts
    assert server.calls.count("commit") == 1
    lost = next(name for name in server.files if name.endswith(".parquet"))
    del server.stored[hashlib.sha256(server.files.pop(lost)).hexdigest()]
    assert uploaded(folder) == 0
    assert server.calls.count("put") == puts + 1
    assert server.files[lost] == (folder / lost).read_bytes()


def test_an_upload_that_was_cut_goes_on_with_the_same_command(server, folder, capsys):
    server.cut = {"commit"}
    assert uploaded(folder) == 2
    refusal(capsys, REPO, "connection", "same command again")
    sent = server.calls.count("put")
    server.cut = set()
    assert uploaded(folder) == 0
    assert server.calls.count("put") == sent
    assert set(server.files) == own_files(folder) | {"README.md"}


@pytest.mark.parametrize("call", ["create", "info", "yaml", "preupload", "batch", "put"])
def test_a_connection_that_is_cut_is_one_line(call, server, folder, capsys):
    server.cut = {call}
    assert uploaded(folder) == 2
    refusal(capsys, REPO, f"the connection to {server.url} failed", "same command again")
    assert server.files == {}


def test_a_hub_that_is_not_there_is_one_line(server, folder, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert uploaded(folder) == 2
    refusal(capsys, "the connection to http://127.0.0.1:9 failed")


def test_offline_mode_is_one_line(server, folder, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert uploaded(folder) == 2
    refusal(capsys, "HF_HUB_OFFLINE")


def test_a_refused_token_is_one_line_and_never_shown(server, folder, capsys):
    wrong = "hf_someOtherSecret999"
    assert uploaded(folder, token=wrong) == 2
    line = refusal(capsys, "the Hub refused the token", "hf auth login", "status 401")
    assert wrong not in line
    assert uploaded(folder, "--verbose", token=wrong) == 2
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert wrong not in captured.err


def test_a_token_in_a_log_line_is_hidden(caplog):
    with hidden_in_logs(TOKEN):
        logging.getLogger("any").warning("sent %s", TOKEN)
    assert "sent [token]" in caplog.text
    assert TOKEN not in caplog.text


def test_the_program_finds_hub_and_login_in_the_environment(server, folder, run_cli):
    position = {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    words = ["upload", "--data_dir", folder, "--repo_id", REPO]
    done = run_cli(*words, **position, HF_TOKEN=TOKEN, HF_DEBUG="1")
    assert (done.returncode, done.stdout) == (0, f"{server.url}/datasets/{REPO}\n")
    assert TOKEN not in done.stderr
    wrong = "hf_someOtherSecret999"
    done = run_cli(*words, "--verbose", **position, HF_TOKEN=wrong)
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad [token]" in done.stderr
    assert wrong not in done.stderr


@pytest.mark.parametrize("token", ["hf_two words", "hf_line\nbreak", "hf_ünicode"])
def test_a_malformed_token_is_refused_without_being_quoted(token, server, folder, capsys):
    assert uploaded(folder, token=token) == 2
    assert "hf_" not in refusal(capsys, "--token")
    assert server.calls == []


def test_without_a_login_one_is_asked_for(server, folder, capsys, monkeypatch):
    words = ["upload", "--data_dir", str(folder), "--repo_id", REPO]
    assert main(words) == 2
    refusal(capsys, "hf auth login", "--token")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(words) == 0


@pytest.mark.parametrize(
    ("call", "status", "words"),
    [
        ("create", 403, "may not write"),
        ("preupload", 403, "may not write"),
        ("preupload", 404, "check --repo_id"),
        ("commit", 413, "refused the upload"),
        ("put", 500, "a fault of its own"),
    ],
)
def test_what_the_hub_refuses_is_one_line(call, status, words, server, folder, capsys):
    server.refuse = {call: status}
    assert uploaded(folder) == 2
    refusal(capsys, REPO, words, f"status {status}: no {call} for you")


def test_private_is_asked_for_and_a_public_repository_is_refused(server, folder, capsys):
    assert uploaded(folder, "--private") == 0
    assert server.created[0]["visibility"] == "private"
    capsys.readouterr()
    server.repo, server.files = {"private": False}, {}
    assert uploaded(folder, "--private") == 2
    refusal(capsys, REPO, "is public", "nothing was sent")
    assert server.files == {}


def test_an_altered_shard_is_refused_by_its_name_before_anything_is_sent(server, folder, capsys):
    for name in sorted(own_files(folder) - {"metadata.json"}):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-20] + b"?" + content[-19:])
        assert uploaded(folder) == 2
        refusal(capsys, name, "sha256")
        (folder / name).unlink()
        assert uploaded(folder) == 2
        refusal(capsys, name, "is missing")
        (folder / name).write_bytes(content)
    assert server.calls == []


@pytest.mark.parametrize(
    "name", ["../secret.parquet", "/etc/passwd", "notes.txt", "data/*.parquet"]
)
def test_metadata_cannot_name_other_files(name, server, folder, capsys):
    metadata = metadata_of(folder)
    metadata["splits"]["train"]["shards"][0]["file"] = name
    (folder / "metadata.json").write_text(json.dumps(metadata))
    assert uploaded(folder) == 2
    refusal(capsys, "metadata.json", name)
    assert server.calls == []


@pytest.mark.parametrize("repo_id", ["name", "a/b/c", "a b/c", "a/..", "datasets/a/b", "a/b.git"])
def test_a_bad_repo_id_is_refused(repo_id, server, folder, capsys):
    assert main(["upload", "--data_dir", str(folder), "--repo_id", repo_id, "--token", TOKEN]) == 2
    refusal(capsys, "--repo_id", repo_id)
    assert server.calls == []


def test_a_folder_that_is_none_is_refused(server, tmp_path, capsys):
    assert uploaded(tmp_path / "nowhere") == 2
    refusal(capsys, "nowhere", "no such folder")
    assert uploaded(tmp_path) == 2
    refusal(capsys, "metadata.json", "preprocess")


def test_the_missing_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=re.escape("pip install 'alphastomics[hub]'")):
        room.upload(folder, REPO, private=False, token=TOKEN, licence=None)


def card_of(folder: Path) -> tuple[dict, str]:
    metadata = parse_metadata((folder / "metadata.json").read_text(), "metadata.json")
    text = room.dataset_card(metadata, REPO, licence_of(None))
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_card_says_what_the_metadata_say(made):
    head, body = card_of(made)
    metadata = metadata_of(made)
    assert head["license"] == "other"
    assert "Licence: not stated" in body
    assert head["size_categories"] == ["n<1K"]
    listed = {entry["split"]: entry["path"] for entry in head["configs"][0]["data_files"]}
    for split, record in metadata["splits"].items():
        assert listed[split] == [shard["file"] for shard in record["shards"]]
        assert f"| {split} | {record['cells']} | {len(record['shards'])} |" in body
    assert "140 cells in 3 slices with 32 genes" in body
    assert "… and 12 more in `metadata.json`" in body
    assert "total of 10000, then log(1 + x); each gene standardised" in body
    assert f'load_dataset("{REPO}")' in body
    assert f'create_dataloaders("{REPO}"' in body


def test_names_from_the_data_are_only_text_in_the_card(made):
    _, body = card_of(made)
    assert "<script>" not in body
    assert "\n# heading" not in body
    assert r"T\|cell" in body
    assert r"x\|\<b\>\`\[a\]\(http\:\/\/e\.vil\)" in body
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {4, 6}


def test_a_licence_set_on_the_hub_is_kept(server, folder):
    server.card_data = {"license": "cc-by-4.0", "pretty_name": "another"}
    assert uploaded(folder) == 0
    text = server.files["README.md"].decode()
    assert yaml.safe_load(text.split("---")[1])["license"] == "cc-by-4.0"
    assert r"**Licence:** cc-by-4\.0" in text


def test_a_licence_that_is_given_stands_in_the_card(server, folder, capsys):
    server.card_data = {"license": "mit"}
    assert uploaded(folder, "--license", "cc-by-4.0") == 0
    text = server.files["README.md"].decode()
    assert yaml.safe_load(text.split("---")[1])["license"] == "cc-by-4.0"
    capsys.readouterr()
    assert uploaded(folder, "--license", "free: [for all]") == 2
    refusal(capsys, "--license", "cc-by-4.0")


@pytest.mark.parametrize(
    ("cells", "name"),
    [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (10**8, "100M<n<1B"), (10**12, "n>1T")],
)
def test_size_classes_are_the_hubs(cells, name):
    assert room.size_category(cells) == name


@pytest.mark.filterwarnings("ignore")
def test_what_arrived_is_what_load_dataset_reads(server, folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    assert uploaded(folder) == 0
    there = tmp_path / "there"
    for name, content in {**server.files, "data/leftover.parquet": b"of an older upload"}.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(content)
    result = datasets.load_dataset(str(there), cache_dir=str(tmp_path / "cache"))
    expected = metadata_of(folder)["splits"]
    assert {split: len(result[split]) for split in result} == {
        split: record["cells"] for split, record in expected.items()
    }
