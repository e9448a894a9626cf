"""Genes and types that a query lacks: files and settings enter; an AnnData with both leaves.

The commands `sample --sample_mode impute` and `label`, and what the notebook shares with them.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alphastomics.config import Config
from alphastomics.config.message import closest
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.generation.commands import default_output, load_for_use, require_target
from alphastomics.generation.gene_features import GeneCells
from alphastomics.generation.impute import LEVEL, Imputed, impute, impute_by_counts
from alphastomics.generation.known_cells import (
    Gathered,
    Source,
    gather,
    require_file_of_cells,
    require_shared,
)
from alphastomics.generation.labels import UNKNOWN, Labels, predict_labels
from alphastomics.generation.output import new_anndata, read_original, write_cells
from alphastomics.generation.training_cells import LEAST_KNOWN
from alphastomics.io.h5ad import write_anndata
from alphastomics.io.spatialdata import STORE_SUFFIX
from alphastomics.preprocessing.owned import require_not_read
from alphastomics.tasks import IMPUTE, LABEL

logger = logging.getLogger(__name__)

SHOWN = 5  # names in a message
# Cells of slices that say a gene, or types, by themselves: dissociated cells are of another
# technique, and add to fewer than these.
SAY_ENOUGH = 1_000
IMPUTED_KEY, IMPUTED_STD_KEY = "imputed", "imputed_std"
TYPE_KEY, PROBABILITY_KEY, PROBABILITIES_KEY = (
    "cell_type_pred",
    "cell_type_probability",
    "cell_type_probabilities",
)


def shown(names: Sequence[str]) -> str:
    """Show the first few of many names."""
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def cells_that_measured(known: GeneCells) -> np.ndarray:
    """Count the cells that measured each gene."""
    cells = np.bincount(known.slice_id, minlength=len(known.slice_names))
    return cells @ known.measured


def impute_panel(gathered: Gathered, part: GeneCells, asked: np.ndarray, seed: int) -> Imputed:
    """Impute genes of cells that measured the same ones.

    Genes that enough cells of slices measured are learned from these, others from dissociated
    training cells, too.
    """
    known, everything = gathered.known, gathered.everything()
    assert everything is not None
    alone = np.zeros(len(asked), dtype=bool)
    if known is not None and (known.measured.any(0) & part.measured.any(0)).any():
        alone = cells_that_measured(known)[asked] >= SAY_ENOUGH
    if gathered.dissociated is None:
        alone[:] = True
    whole = Imputed.empty(len(part), len(asked))
    for source, chosen in ((known, alone), (everything, ~alone)):
        if not chosen.any():
            continue
        assert source is not None
        require_shared(part, source)
        predicted = impute(source, part, asked[chosen], seed, is_log=gathered.is_log)
        for target, values in zip(whole, predicted, strict=True):
            target[..., chosen] = values
    return whole


def asked_genes(
    gathered: Gathered, wanted: Sequence[str] | None, available: np.ndarray
) -> np.ndarray:
    """Return the numbers of the genes that the result has, or refuse.

    Parameters
    ----------
    gathered
        The query, and what is known beside it.
    wanted
        Names; None are all genes of the model and of the reference.
    available
        Genes that something is known of.
    """
    genes, measured = gathered.genes, gathered.query.measured
    number = {name: index for index, name in enumerate(genes)}
    if wanted is None:
        unknown = [genes[index] for index in np.flatnonzero(~available & ~measured.all(0))]
        if unknown:
            logger.warning(
                "%d genes were measured by no training slice, and are left out: %s",
                *(len(unknown), shown(unknown)),
            )
        asked = np.flatnonzero(available | measured.all(0))
    else:
        names = list(dict.fromkeys(wanted))
        strange = [name for name in names if name not in number]
        if strange:
            meant = closest(strange[0], genes)
            hint = f"did you mean {meant}? " if meant else ""
            raise InputError(
                f"--genes: {shown(strange)}: not among the {len(genes)} genes of the model and the "
                f"reference; {hint}a --reference of cells that measured them adds genes"
            )
        asked = np.array([number[name] for name in names], dtype=np.int64)
        unknown = [genes[i] for i in asked if not available[i] and not measured[:, i].all()]
        if unknown:
            raise InputError(
                f"--genes: {shown(unknown)}: measured by no training slice; give a --reference of "
                "cells that measured them"
            )
    if measured[:, asked].all():
        what = "these genes" if wanted is not None else f"all {len(asked)} genes"
        raise InputError(f"nothing to impute: the query measured {what} itself")
    return asked


def impute_query(
    module: AlphaSTomicsModule, gathered: Gathered, wanted: Sequence[str] | None, seed: int
) -> tuple[np.ndarray, Imputed, str]:
    """Impute the genes that each slice lacks; keep those that it measured.

    Returns the numbers of the genes, their values, and in words what they come from.
    """
    counts, known, query = module.average.count_model, gathered.everything(), gathered.query
    by_counts = known is None
    if counts is not None and not bool(counts.is_fitted):
        counts = None
    if known is None and counts is None:
        raise InputError(no_known_cells("genes are imputed"))
    if known is not None:
        available = cells_that_measured(known) >= LEAST_KNOWN
        without = 0 if gathered.dissociated is None else len(gathered.dissociated)
        more = f", {without} of them dissociated" if without else ""
        method = f"{len(known)} known cells{more}"
    else:
        assert counts is not None
        available, method = counts.measured.any(0).cpu().numpy(), "the count model"
        logger.warning("%s", no_known_cells("the count model alone imputes, uncalibrated"))
    asked = asked_genes(gathered, wanted, available)
    shape = len(query), len(asked)
    whole = Imputed.empty(*shape)
    whole.values[:], whole.std[:] = query.values[:, asked], 0
    for rows in gathered.panels():
        lacking = np.flatnonzero(~query.measured[query.slice_id[rows[0]]][asked])
        if not len(lacking):
            continue
        part = query.take(rows)
        if by_counts:
            assert counts is not None
            scaled = gathered.cells.expression[rows]
            predicted = impute_by_counts(
                counts, scaled, part, asked[lacking], seed, is_log=gathered.is_log
            )
        else:
            predicted = impute_panel(gathered, part, asked[lacking], seed)
        for target, values in zip(whole[:2], predicted[:2], strict=True):
            target[np.ix_(rows, lacking)] = values
        whole.expected_r[lacking], whole.interval[lacking] = (
            predicted.expected_r,
            predicted.interval,
        )
    return asked, whole, method


def no_known_cells(what: str) -> str:
    """Say that neither training cells nor a reference is there."""
    return (
        f"the training cells were not found: {what} from training cells or a reference; name the "
        "processed folder of the training with --data_dir, or cells with --reference"
    )


def imputed_anndata(
    original: Any, gathered: Gathered, asked: np.ndarray, imputed: Imputed, method: str
) -> Any:
    """Make an AnnData of the query's cells and the genes that were asked for."""
    import pandas as pd
    from anndata import AnnData

    names = [gathered.genes[index] for index in asked]
    var = pd.DataFrame(
        {
            "measured": gathered.query.measured[:, asked].all(0),
            "expected_r": imputed.expected_r,
            f"interval_{100 * LEVEL:g}": imputed.interval,
        },
        index=pd.Index(names, dtype=object),
    )
    values = imputed.values.astype(np.float32)
    data = AnnData(values, obs=original.obs.copy(), var=var)
    for key in original.obsm:
        data.obsm[key] = original.obsm[key].copy()
    data.layers[IMPUTED_KEY] = values
    data.layers[IMPUTED_STD_KEY] = imputed.std.astype(np.float32)
    data.uns["alphastomics"] = {
        "mode": IMPUTE,
        "genes": np.array(names, dtype=object),
        IMPUTE: {"method": method, "is_log_normalized": gathered.is_log},
    }
    return data


def label_query(module: AlphaSTomicsModule, gathered: Gathered, seed: int) -> Labels:
    """Predict the type of every cell of a query."""
    known, query = gathered.known, gathered.query
    if known is None or (known.cell_type != UNKNOWN).sum() < SAY_ENOUGH:
        known = gathered.everything()
    if known is None:
        raise InputError(no_known_cells("cell types are predicted"))
    if not (known.cell_type != UNKNOWN).any():
        raise InputError(
            "neither training cells that were found nor the reference have cell types: preprocess "
            "with --cell_type_key, name the processed folder of the training with --data_dir, or "
            "give a --reference that has them"
        )
    names = np.unique(known.cell_type[known.cell_type != UNKNOWN].astype(str)).tolist()
    probability, accuracy = np.zeros((len(query), len(names))), []
    for rows in gathered.panels():
        part = query.take(rows)
        require_shared(part, known)
        predicted = predict_labels(known, part, seed, is_log=gathered.is_log)
        columns = [names.index(name) for name in predicted.names]
        probability[np.ix_(rows, columns)] = predicted.probability
        accuracy.append(predicted.expected_accuracy * len(rows) / len(query))
    return Labels(names, probability, sum(accuracy))


def put_labels(data: Any, labels: Labels) -> None:
    """Write types and probabilities into an AnnData, under the documented keys."""
    import pandas as pd

    best = labels.probability.argmax(1)
    data.obs[TYPE_KEY] = pd.Categorical.from_codes(best, categories=labels.names)
    data.obs[PROBABILITY_KEY] = labels.probability.max(1)
    data.obsm[PROBABILITIES_KEY] = labels.probability.astype(np.float32)
    data.uns[PROBABILITIES_KEY] = {
        "names": np.array(labels.names, dtype=object),
        "expected_accuracy": labels.expected_accuracy,
    }


def of_any_format(config: Config) -> Config:
    """Return settings that recognise a file by its content: --format is that of the input."""
    plain = {"format": None, "table": None}
    options = config.data.preprocessing.model_copy(update=plain)
    data = config.data.model_copy(update={"preprocessing": options})
    return config.model_copy(update={"data": data})


def annotate(
    config: Config,
    *,
    checkpoint: Path,
    input_data: Path | None,
    output: Path | None,
    split: str,
    overwrite: bool,
    reference: Path | None,
    genes: Sequence[str] | None,
) -> dict[str, Any]:
    """Impute genes of an input, or label its cells, and write a copy of it."""
    mode, seed = config.sampling.mode, config.seed.global_seed
    if input_data is None:
        raise InputError(f"sample: {mode} needs cells: give --input_data")
    if genes and mode == LABEL:
        raise InputError("--genes: counts with --sample_mode impute; leave it out")
    target = default_output(input_data).with_suffix(".h5ad") if output is None else output
    if target.suffix not in (".h5ad", STORE_SUFFIX):
        raise InputError(f"{target}: expected an --output that ends in .h5ad or {STORE_SUFFIX}")
    require_target(target, overwrite=overwrite)
    require_not_read(target, checkpoint, input_data, reference)
    if reference is not None:
        require_file_of_cells(reference)
    module, known_genes = load_for_use(checkpoint)
    near = (Path(config.data.processed_data_dir), checkpoint)
    of_reference = None if reference is None else Source(reference, of_any_format(config))
    query = Source(input_data, config, split)
    gathered = gather(module, known_genes, query, of_reference, near, genes)
    if target.suffix == STORE_SUFFIX and gathered.cells.position is None:
        raise InputError(
            f"{target}: a SpatialData store shows cells at their positions, and {input_data} has "
            "none, or not for all of them: give an --output that ends in .h5ad"
        )
    original = read_original(input_data, config)
    if original is None:
        original = new_anndata(gathered.cells, known_genes)
    said: dict[str, Any]
    if mode == LABEL:
        labels = label_query(module, gathered, seed)
        put_labels(original, labels)
        data = original
        said = {"cell_types": len(labels.names), "expected_accuracy": labels.expected_accuracy}
    else:
        asked, imputed, method = impute_query(module, gathered, genes, seed)
        data = imputed_anndata(original, gathered, asked, imputed, method)
        said = {"genes": len(asked), "imputed": int((~data.var["measured"]).sum()), "from": method}
    if gathered.cells.position is None:
        write_anndata(target, data, compression=None)
    else:
        write_cells(target, data, gathered.cells.position, gathered.cells, is_predicted=False)
    return {"output": str(target), "mode": mode, "cells": len(gathered.query), **said}
