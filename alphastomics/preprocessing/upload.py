"""To the Hub: a processed folder enters, the address of a dataset there leaves.

Only the files that metadata.json lists go up, each after its sha256 was compared, together with a
card that is made from metadata.json. Nothing is written into the folder, and the access token is
kept out of every message.
"""

import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from alphastomics.errors import InputError
from alphastomics.files import write_text
from alphastomics.preprocessing.folder import HUB_ID, DataFolder
from alphastomics.preprocessing.schema import (
    DATA_FOLDER,
    METADATA_FILE,
    SCALING_FILE,
    Metadata,
    SliceRecord,
)
from alphastomics.progress import track

logger = logging.getLogger(__name__)

CARD_FILE = "README.md"
SHARD_FILE = re.compile(rf"{DATA_FOLDER}/[A-Za-z0-9_][\w.-]*\.parquet", re.ASCII)
REDACTED = "[token]"
SHOWN_GENES, SHOWN_TYPES, SHOWN_SLICES, SHOWN_LETTERS = 20, 100, 50, 80
SHOWN_WORDS = 300  # letters of what the Hub said
LICENCE_FIELDS = ("license", "license_name", "license_link")
NO_LICENCE = {"license": "other", "license_name": "unknown"}
UNAUTHORIZED, FORBIDDEN, NOT_FOUND, SERVER_ERROR = 401, 403, 404, 500


def upload(data_dir: Path, repo_id: str, *, private: bool, token: str | None) -> str:
    """Send a processed folder to the Hub; return the address of the dataset.

    Giving the same command again goes on: the Hub knows files by their digests, so that what has
    arrived is not sent again.

    Parameters
    ----------
    data_dir
        Folder that `preprocess` wrote.
    repo_id
        Name of the dataset, as owner/name; made if there is none.
    private
        Make it private; a public one of that name is refused.
    token
        Access token; None takes the usual Hub login.
    """
    hub = _client()
    _require_repo_id(hub, repo_id)
    if not data_dir.is_dir():
        raise InputError(f"{data_dir}: there is no such folder: name one that `preprocess` wrote")
    secret = _secret(hub, token)
    folder = DataFolder(data_dir)
    metadata = folder.metadata()
    files = checked_files(folder, metadata)
    # ValueError and RuntimeError: how the client wraps replies and files that went wrong.
    failures = (hub.errors.HTTPError, OSError, ValueError, RuntimeError)
    try:
        with hidden_in_logs(secret):
            api = hub.HfApi(token=secret)
            return _send(api, data_dir, repo_id, metadata, files, private=private)
    except InputError:
        raise
    except failures as error:
        if isinstance(error, OSError) and error.filename:
            raise  # a file here, not the Hub: the door names it
        # from None: the client's own message may quote the header that carries the token.
        message = explained(error, repo_id, hub.constants.ENDPOINT)
        raise InputError(message.replace(secret, REDACTED)) from None


def _client() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise InputError(
            "upload: needs huggingface_hub, which is not installed: pip install 'alphastomics[hub]'"
        ) from error
    return huggingface_hub


def _require_repo_id(hub: Any, repo_id: str) -> None:
    try:
        hub.utils.validate_repo_id(repo_id)
    except hub.errors.HFValidationError as error:
        raise InputError(f"--repo_id: {error}") from error
    if not HUB_ID.fullmatch(repo_id):
        raise InputError(f"--repo_id: expected owner/name, got {repo_id!r}")


def _secret(hub: Any, token: str | None) -> str:
    """Return the token to send, from the flag or the login; a malformed one is never quoted."""
    if token is None:
        token = hub.get_token()
    if token is None:
        raise InputError(
            "upload: there is no Hub login on this machine: run `hf auth login`, set HF_TOKEN, "
            "or give --token"
        )
    if not re.fullmatch(r"[!-~]+", token):
        raise InputError("--token: is empty, or holds spaces or other letters than a token has")
    return token


def checked_files(folder: DataFolder, metadata: Metadata) -> list[str]:
    """List the folder's own files, after comparing them with the sha256 in metadata.json."""
    shards = [shard for split in metadata.splits.values() for shard in split.shards]
    digests = {shard.file: shard.sha256 for shard in shards}
    for name in digests:
        if not SHARD_FILE.fullmatch(name):
            raise InputError(
                f"{folder.name_of(METADATA_FILE)}: lists {name!r}, which is no shard of this "
                "folder: the file was altered; preprocess again"
            )
    if metadata.scaling_sha256 is not None:
        digests[SCALING_FILE] = metadata.scaling_sha256
    with track("checking", len(digests), "files") as advance:
        for name, digest in digests.items():
            folder.size_of(name)  # refuses a missing file by its name
            if folder.digest_of(name) != digest:
                raise InputError(
                    f"{folder.name_of(name)}: is not the file that {METADATA_FILE} lists (sha256 "
                    "differs): it was altered or damaged; copy it again, or preprocess again"
                )
            advance(1)
    return [METADATA_FILE, *digests]


def _send(
    api: Any, data_dir: Path, repo_id: str, metadata: Metadata, files: list[str], *, private: bool
) -> str:
    # None, not False: without the flag, the owner's own default stands.
    address = api.create_repo(repo_id, repo_type="dataset", private=private or None, exist_ok=True)
    known = api.dataset_info(repo_id)
    if private and not known.private:
        raise InputError(
            f"{repo_id}: exists on the Hub and is public, so nothing was sent: make it private in "
            "its settings there, choose another --repo_id, or leave --private out"
        )
    card = dataset_card(metadata, repo_id, licence_of(known.card_data))
    with tempfile.TemporaryDirectory(prefix="alphastomics-upload-") as place:
        stage(Path(place), data_dir, files, card)
        logger.info("uploading %d files to %s", len(files) + 1, address)
        api.upload_folder(
            repo_id=repo_id,
            repo_type="dataset",
            folder_path=place,
            allow_patterns=[CARD_FILE, *files],
            commit_message="Upload a processed folder of AlphaSTomics",
        )
    return str(address)


def stage(place: Path, data_dir: Path, files: list[str], card: str) -> None:
    """Lay out what goes up, by links: the user's folder stays as it is, and nothing else is near.

    One folder with card and data becomes one commit, so that readers never meet half of it.
    """
    (place / DATA_FOLDER).mkdir()
    for name in files:
        (place / name).symlink_to((data_dir / name).resolve())
    write_text(place / CARD_FILE, card)


@contextmanager
def hidden_in_logs(secret: str) -> Iterator[None]:
    """Take the token out of whatever is logged meanwhile, by the client or by what it calls."""

    def redact(record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage().replace(secret, REDACTED), ()
        return True

    handlers = [
        handler
        for name in (None, "huggingface_hub")
        for handler in list(logging.getLogger(name).handlers)
    ]
    for handler in handlers:
        handler.addFilter(redact)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(redact)


def explained(error: BaseException, repo_id: str, endpoint: str) -> str:
    """Say in one line what went wrong on the way to the Hub, and what to do."""
    cause: BaseException = error
    while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
        cause = cause.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status is None:
        said = " ".join(str(cause).split())[:SHOWN_WORDS] or type(cause).__name__
    else:  # the client's own words quote addresses, and those of storage are signed
        reason = " ".join((getattr(cause, "server_message", None) or "").split())[:SHOWN_WORDS]
        said = f"status {status}: {reason}" if reason else f"status {status}"
    if status == UNAUTHORIZED:
        advice = "the Hub refused the token: give a valid one, or run `hf auth login` again"
    elif status == FORBIDDEN or isinstance(cause, PermissionError):
        advice = "the token may not write there: give one with write access, or another owner"
    elif status == NOT_FOUND:
        advice = f"{endpoint} knows no such owner or dataset: check --repo_id and the token"
    elif status is not None and status < SERVER_ERROR:
        advice = "the Hub refused the upload"
    elif status is not None:
        advice = f"{endpoint} has a fault of its own: give the same command again later"
    elif isinstance(cause, ValueError):
        advice = f"{endpoint} did not answer as the Hub does: check HF_ENDPOINT and the network"
    else:
        advice = (
            f"the connection to {endpoint} failed: check the network and give the same command "
            "again; what has arrived is not sent twice"
        )
    return f"{repo_id}: {advice} ({said})"


def licence_of(known: Any) -> dict[str, Any]:
    """Keep the licence that the owner wrote into the card on the Hub; none is stated otherwise."""
    fields = {} if known is None else known.to_dict()
    stated = {name: fields[name] for name in LICENCE_FIELDS if fields.get(name)}
    return stated if "license" in stated else dict(NO_LICENCE)


def plain(text: str) -> str:
    """Make a name from the data harmless in Markdown: every letter stands for itself."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    short = " ".join(printable.split())
    short = short if len(short) <= SHOWN_LETTERS else short[: SHOWN_LETTERS - 1] + "…"
    return re.sub(r"([!-+./:-@\[-`{-~])", r"\\\1", short)


def dataset_card(metadata: Metadata, repo_id: str, licence: dict[str, Any]) -> str:
    """Write the dataset card: what is in it, how it was made, and how to load it."""
    cells = sum(split.cells for split in metadata.splits.values())
    parts = [
        f"---\n{front_matter(metadata, repo_id, licence, cells)}---",
        f"# {plain(repo_id.partition('/')[2])}",
        f"Spatial transcriptomics of {cells:,} cells in {len(metadata.slices):,} slices with "
        f"{metadata.num_genes:,} genes: expression and position of every cell, prepared by "
        f"AlphaSTomics {plain(metadata.version)}.",
        _licence_note(licence),
        f"## Cells\n{_split_table(metadata)}",
        f"## Slices\n{_slice_table(metadata.slices, list(metadata.splits))}",
        f"## Genes\n{_names(metadata.genes, SHOWN_GENES)}",
        f"## Cell types\n{_names(metadata.cell_types or [], SHOWN_TYPES)}",
        f"## Values\n{_values(metadata)}",
        f"## Loading\n{_loading(repo_id)}",
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(metadata: Metadata, repo_id: str, licence: dict[str, Any], num_cells: int) -> str:
    """Write the card's YAML; shards are named one by one, so that leftovers are never read."""
    data_files = [
        {"split": name, "path": [shard.file for shard in split.shards]}
        for name, split in metadata.splits.items()
        if split.shards
    ]
    fields = {
        **licence,
        "pretty_name": repo_id.partition("/")[2],
        "tags": ["alphastomics", "biology", "spatial-transcriptomics"],
        "size_categories": [size_category(num_cells)],
        "configs": [{"config_name": "default", "data_files": data_files}],
    }
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def size_category(num_cells: int) -> str:
    """Name the Hub's size class of a number of rows."""
    names = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    class_of = next((i for i in range(len(names)) if num_cells < 10 ** (i + 3)), len(names))
    if class_of == 0:
        return f"n<{names[0]}"
    return (
        f"n>{names[-1]}" if class_of == len(names) else f"{names[class_of - 1]}<n<{names[class_of]}"
    )


def _licence_note(licence: dict[str, Any]) -> str:
    if licence == NO_LICENCE:
        return (
            "**Licence: not stated.** The owner of this dataset has not said under which terms it "
            "may be used. Owner: set `license` in the first lines of this card; a later upload "
            "keeps it."
        )
    named = licence.get("license_name") or licence["license"]
    return f"**Licence:** {plain(str(named))}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _split_table(metadata: Metadata) -> str:
    rows = [
        [plain(name), f"{split.cells:,}", f"{len(split.shards):,}"]
        for name, split in metadata.splits.items()
    ]
    table = _table(["split", "cells", "files"], rows)
    return f"{table}\n\nSplit by {metadata.split_by}; layout {metadata.layout}."


def _slice_table(slices: list[SliceRecord], splits: list[str]) -> str:
    rows = [
        [
            str(number),
            plain(record.name),
            *(f"{record.cells_per_split.get(split, 0):,}" for split in splits),
        ]
        for number, record in enumerate(slices[:SHOWN_SLICES])
    ]
    table = _table(["slice_id", "slice", *map(plain, splits)], rows)
    more = len(slices) - SHOWN_SLICES
    return table if more <= 0 else f"{table}\n\n… and {more:,} more in `{METADATA_FILE}`."


def _names(names: list[str], shown: int) -> str:
    if not names:
        return "None given."
    more = len(names) - shown
    tail = f", … and {more:,} more in `{METADATA_FILE}`" if more > 0 else ""
    return f"{len(names):,}: {', '.join(map(plain, names[:shown]))}{tail}."


def _values(metadata: Metadata) -> str:
    done = metadata.normalization
    total = f"each cell brought to a total of {done.target_sum:g}, then log(1 + x)"
    steps = [total if done.log_normalize else "not log-normalised"]
    steps.append("each gene standardised within its slice" if done.scale else "not standardised")
    columns = (
        "`expression` (one number per gene)"
        if metadata.storage == "dense"
        else f"`gene_index` and `gene_value` lists; {done.absent_value}"
    )
    return (
        f"Expression: {'; '.join(steps)}. Columns: {columns}; `position` (x, y, z, in the original "
        f"units); `slice_id`; `cell_id`; `obs_name`"
        f"{'; `cell_type`' if metadata.cell_types is not None else ''}. Gene names, cell type "
        f"names and all else are in `{METADATA_FILE}`."
    )


def _loading(repo_id: str) -> str:
    return f"""```python
from datasets import load_dataset

cells = load_dataset("{repo_id}")
```

```python
from alphastomics.preprocessing.batch_loader import create_dataloaders

train, validation, test = create_dataloaders("{repo_id}", batch_size=1024, streaming=True)
```"""
