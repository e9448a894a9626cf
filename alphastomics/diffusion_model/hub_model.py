"""A model as a folder of plain files: a trained module enters, and comes back, here or by the Hub.

model.safetensors has the averaged weights, config.json config, genes and scale, record.json how the
model was trained and how it scored, README.md the same for people to read. Nothing is pickled.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from alphastomics.diffusion_model.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    export_weights,
    load_module,
)
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.run_folder import RunFolder, checkpoint_of, read_record
from alphastomics.errors import InputError
from alphastomics.io.files import make_folder, write_text
from alphastomics.io.hub import (
    CARD_FILE,
    NO_LICENCE,
    Connection,
    Licence,
    connect,
    escaped,
    is_hub_id,
    licence_id,
    licence_note,
    listed,
    markdown_table,
    plain_markdown,
)
from alphastomics.preprocessing.resume import write_marker

RECORD_FILE = "record.json"
SHOWN_GENES = 20
TRAINING_KEYS = ("steps", "epochs", "best_val_loss")
NO_SCORES = (
    "None yet: `alphastomics test` (or `.evaluate()`) writes them, and the next upload shows them."
)


class TrainedModel(NamedTuple):
    """A module, its genes, and what is written down about it.

    `record` has `training` (steps, epochs, best_val_loss), `scores` ({mode: {method: {metric:
    value}}}) and `setup` (where in an AnnData its input stands), each where it is known.
    """

    module: AlphaSTomicsModule
    genes: list[str]
    record: dict[str, Any]


def read_model(path: Path) -> TrainedModel:
    """Read a model folder, a run folder or a checkpoint, with all that is written beside it."""
    module, genes = load_module(path)
    kept = path / RECORD_FILE
    if kept.is_file():
        return TrainedModel(module, genes, read_record(kept))
    return TrainedModel(module, genes, record_beside(checkpoint_of(path)))


def record_beside(checkpoint: Path) -> dict[str, Any]:
    """Gather what `train` and `test` wrote near a checkpoint."""
    record: dict[str, Any] = {}
    summary_file = RunFolder(checkpoint.parent.parent).summary
    if summary_file.is_file():
        summary = read_record(summary_file)
        # The run's figures are those of its best checkpoint, not of any other.
        if Path(str(summary.get("best_checkpoint"))).name == checkpoint.name:
            record["training"] = {key: summary[key] for key in TRAINING_KEYS if key in summary}
    scores = checkpoint.with_name(f"{checkpoint.stem}_scores.json")
    if scores.is_file():
        record["scores"] = read_record(scores)
    verdict = checkpoint.resolve().parent.parent / "verdict.json"
    if verdict.is_file():
        record["verdict"] = read_record(verdict)
    return record


def write_model(folder: Path, model: TrainedModel, name: str, licence: Licence) -> None:
    """Write a model folder; only its own four files are replaced."""
    make_folder(folder)
    write_text(folder / CARD_FILE, model_card(model, name, licence))
    write_marker(folder / RECORD_FILE, model.record)
    export_weights(model.module, model.genes, folder)


def upload_model(
    path: Path, repo_id: str, *, private: bool, token: str | None, licence: str | None
) -> str:
    """Send a model to the Hub with its card; return its address.

    Parameters
    ----------
    path
        A checkpoint, the folder of a run, or a model folder.
    repo_id
        Name of the model, as owner/name; made if there is none.
    private
        Make it private; a public one of that name is refused.
    token
        Access token; None takes the usual Hub login.
    licence
        Licence for the card; None keeps what the card on the Hub says.
    """
    connection = connect(repo_id, token, writing=True)
    return publish_model(connection, read_model(path), private=private, licence=licence)


def publish_model(
    connection: Connection, model: TrainedModel, *, private: bool, licence: str | None
) -> str:
    """Write a model to a temporary folder and send it."""
    with tempfile.TemporaryDirectory(prefix="alphastomics-model-") as path:
        folder, name = Path(path), connection.repo_id
        write_model(folder, model, name, dict(NO_LICENCE))
        files = {part: folder / part for part in (CONFIG_FILE, RECORD_FILE, WEIGHTS_FILE)}

        def card(terms: Licence) -> str:
            return model_card(model, name, terms)

        return connection.publish("model", files, card, private=private, licence=licence)


def find_model(where: str | Path, *, token: str | None, revision: str | None) -> Path:
    """Return the folder of a model: one that is here, or one that is fetched from the Hub."""
    path = Path(where)
    if path.exists():
        return path
    if not is_hub_id(str(where)):
        raise InputError(
            f"{where}: there is no such folder, and it is no name on the Hub (owner/name)"
        )
    connection = connect(str(where), token, writing=False)
    connection.fetch(RECORD_FILE, revision, needed=False)  # weights alone are a model, too
    connection.fetch(CONFIG_FILE, revision, needed=True)
    weights = connection.fetch(WEIGHTS_FILE, revision, needed=True)
    assert weights is not None
    return weights.parent


def stated(licence: str | None) -> Licence:
    """Return the fields of a licence that the caller names, or of none."""
    return dict(NO_LICENCE) if licence is None else {"license": licence_id(licence)}


def model_card(model: TrainedModel, name: str, licence: Licence) -> str:
    """Write the model card: what it is, how it was trained, how it scored, how to use it."""
    fields = {
        **licence,
        "library_name": "alphastomics",
        "tags": ["alphastomics", "biology", "spatial-transcriptomics"],
    }
    settings = model.module.config
    weights = sum(value.numel() for value in model.module.average.parameters())
    sizes = settings.model
    parts = [
        f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---",
        f"# {plain_markdown(name.rpartition('/')[2])}",
        f"A diffusion transformer of AlphaSTomics for expression and position of cells in tissue: "
        f"{weights:,} parameters ({sizes.n_layers} layers, width {sizes.d_model}), "
        f"{len(model.genes):,} genes, trained for `{settings.training.mode}`.",
        licence_note(licence, "model"),
        f"## Training\n{_training(model.record)}",
        f"## Scores\n{_judged(model.record)}",
        f"## Genes\n{listed(model.genes, SHOWN_GENES, CONFIG_FILE)}",
        f"## Use\n{_use(name)}",
    ]
    return "\n\n".join(parts) + "\n"


def _training(record: Mapping[str, Any]) -> str:
    known = record.get("training") or {}
    rows = [[key, _number(known[key])] for key in TRAINING_KEYS if known.get(key) is not None]
    rest = f"All settings are in `{CONFIG_FILE}`."
    return f"{markdown_table(['', 'value'], rows)}\n\n{rest}" if rows else rest


def _judged(record: Mapping[str, Any]) -> str:
    """Show how training judged the model, and the scores of `test`, where they are known."""
    parts = [_verdict(record.get("verdict")), _scores(record.get("scores"))]
    return "\n\n".join(filter(None, parts)) or NO_SCORES


def _verdict(verdict: Any) -> str:
    """List the sentences of a verdict, and say what was held out for it."""
    if not isinstance(verdict, Mapping) or not verdict.get("sentences"):
        return ""
    held_out = escaped(str(verdict.get("held_out")))
    sentences = [f"- {escaped(str(sentence))}" for sentence in verdict["sentences"]]
    return "\n".join([f"By what training held out ({held_out}):", "", *sentences])


def _scores(scores: Any) -> str:
    """Show each mode's metrics, ours beside the baselines."""
    if not isinstance(scores, Mapping):
        return ""
    parts = []
    for mode, methods in scores.items():
        metrics = list(dict.fromkeys(name for values in methods.values() for name in values))
        rows = [
            [plain_markdown(metric), *(_number(values.get(metric)) for values in methods.values())]
            for metric in metrics
        ]
        header = ["metric", *map(plain_markdown, methods)]
        parts.append(f"### {plain_markdown(mode)}\n{markdown_table(header, rows)}")
    return "\n\n".join(parts)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else ""


def _use(name: str) -> str:
    return f"""```python
import anndata
from alphastomics import AlphaSTomics

model = AlphaSTomics.from_pretrained("{name}")
cells = anndata.read_h5ad("cells.h5ad")  # counts in X
model.predict_positions(cells)  # cells.obsm["spatial_pred"], cells.obsm["spatial_std"]
```"""
