"""A data set for the Hub: a processed folder enters, the address of a dataset there leaves.

Only the files that metadata.json lists go up, each after its sha256 was compared, together with a
card that is made from metadata.json.
"""

from pathlib import Path

import yaml

from alphastomics.errors import InputError
from alphastomics.io.hub import (
    Licence,
    connect,
    licence_note,
    listed,
    markdown_table,
    plain_markdown,
)
from alphastomics.io.progress import track
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.schema import (
    METADATA_FILE,
    REFERENCE,
    SPLITS,
    Metadata,
    SliceRecord,
)

SHOWN_GENES, SHOWN_TYPES, SHOWN_SLICES = 20, 100, 50


def upload(
    data_dir: Path, repo_id: str, *, private: bool, token: str | None, licence: str | None
) -> str:
    """Send a processed folder to the Hub; return the address of the dataset.

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
    licence
        Licence for the card; None keeps what the card on the Hub says.
    """
    connection = connect(repo_id, token, writing=True)
    if not data_dir.is_dir():
        raise InputError(f"{data_dir}: there is no such folder: name one that `preprocess` wrote")
    folder = DataFolder(data_dir)
    metadata = folder.metadata()
    files = {name: data_dir / name for name in checked_files(folder, metadata)}

    def card(terms: Licence) -> str:
        return dataset_card(metadata, repo_id, terms)

    return connection.publish("dataset", files, card, private=private, licence=licence)


def checked_files(folder: DataFolder, metadata: Metadata) -> list[str]:
    """List the folder's own files, after comparing them with the sha256 in metadata.json."""
    with track("checking", len(metadata.checksums), "files") as advance:
        for name, digest in metadata.checksums.items():
            folder.size_of(name)  # refuses a missing file by its name
            if folder.digest_of(name) != digest:
                raise InputError(
                    f"{folder.name_of(name)}: is not the file that {METADATA_FILE} lists (sha256 "
                    "differs): it was altered or damaged; copy it again, or preprocess again"
                )
            advance(1)
    return [METADATA_FILE, *metadata.checksums]


def dataset_card(metadata: Metadata, repo_id: str, licence: Licence) -> str:
    """Write the dataset card: what is in it, how it was made, and how to load it."""
    cells = sum(metadata.splits[name].cells for name in SPLITS)
    dissociated = metadata.reference_cells
    more = f" {dissociated:,} dissociated cells, which have none, are the split {REFERENCE}."
    parts = [
        f"---\n{front_matter(metadata, repo_id, licence, cells + dissociated)}---",
        f"# {plain_markdown(repo_id.partition('/')[2])}",
        f"Spatial transcriptomics of {cells:,} cells in {len(metadata.slices):,} slices with "
        f"{metadata.num_genes:,} genes: expression and position of every cell, prepared by "
        f"AlphaSTomics {plain_markdown(metadata.version)}.{more if dissociated else ''}",
        licence_note(licence, "dataset"),
        f"## Cells\n{_split_table(metadata)}",
        f"## Slices\n{_slice_table(metadata.slices, list(SPLITS))}",
        f"## Genes\n{listed(metadata.genes, SHOWN_GENES, METADATA_FILE)}",
        f"## Cell types\n{listed(metadata.cell_types or [], SHOWN_TYPES, METADATA_FILE)}",
        f"## Values\n{_values(metadata)}",
        f"## Loading\n{_loading(repo_id)}",
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(metadata: Metadata, repo_id: str, licence: Licence, num_cells: int) -> str:
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


def _split_table(metadata: Metadata) -> str:
    rows = [
        [plain_markdown(name), f"{split.cells:,}", f"{len(split.shards):,}"]
        for name, split in metadata.splits.items()
    ]
    shown = markdown_table(["split", "cells", "files"], rows)
    return f"{shown}\n\nSplit by {metadata.split_by}; layout {metadata.layout}."


def _slice_table(slices: list[SliceRecord], splits: list[str]) -> str:
    rows = [
        [
            str(number),
            plain_markdown(record.name),
            *(f"{record.cells_per_split.get(split, 0):,}" for split in splits),
        ]
        for number, record in enumerate(slices[:SHOWN_SLICES])
    ]
    shown = markdown_table(["slice_id", "slice", *map(plain_markdown, splits)], rows)
    more = len(slices) - SHOWN_SLICES
    return shown if more <= 0 else f"{shown}\n\n… and {more:,} more in `{METADATA_FILE}`."


def _values(metadata: Metadata) -> str:
    done = metadata.normalization
    total = f"each cell brought to a total of {done.target_sum:g}, then log(1 + x)"
    steps = [total if done.log_normalize else "not log-normalised"]
    steps.append("each gene standardised within its slice" if done.scale else "not standardised")
    for key, step in {"log_normalize": "log-normalised", "scale": "standardised"}.items():
        as_they_came = [record for record in metadata.slices if getattr(record, key) is False]
        if getattr(done, key) and as_they_came:
            steps.append(f"{len(as_they_came)} slice(s) came already {step}")
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
