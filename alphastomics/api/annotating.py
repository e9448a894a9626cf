"""What a model says of cells beside positions: AnnData enters; genes that it lacks, types, leave.

The ways of `alphastomics sample --sample_mode impute` and `label`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from anndata import AnnData

from alphastomics.api.notebook import for_notebooks
from alphastomics.api.saving import SavingVerbs
from alphastomics.api.settings import updated
from alphastomics.api.setup import put_quietly, require_anndata
from alphastomics.config import Config
from alphastomics.errors import InputError
from alphastomics.generation.annotation import (
    impute_query,
    imputed_anndata,
    label_query,
    put_labels,
)
from alphastomics.generation.known_cells import Gathered, Source, gather


@for_notebooks
class AnnotatingVerbs(SavingVerbs):
    """Verbs that complete what is known of cells: their other genes, their types."""

    def impute(
        self,
        adata: Any,
        *,
        genes: Sequence[str] | None = None,
        reference: Any = None,
        **keywords: Any,
    ) -> AnnData:
        """Predict genes that the slices did not measure, with a calibrated std.

        Parameters
        ----------
        adata
            Cells with counts; with coordinates, their surroundings count, too.
        genes
            Genes to return: the model's or the reference's. None returns all of them; those that a
            slice measured stay as they are.
        reference
            An AnnData of more cells to learn from, such as dissociated ones; its genes need not be
            the model's. The training cells count where their processed folder is found.
        **keywords
            `seed`, and settings.

        Returns
        -------
        anndata.AnnData
            The cells and the genes. X and layers["imputed"] are log-normalised to the total of
            your genes, layers["imputed_std"] is how far off they are (0 for measured genes).
            var["expected_r"] is the correlation with the truth over left-out cells: it says which
            genes to trust. Nine of ten true values lie within var["interval_90"] stds.
        """
        if isinstance(genes, str):
            raise InputError("genes: expected a list of names, got a single one")
        config = updated(self.config, keywords)
        wanted = None if genes is None else [str(name) for name in genes]
        with self._gathered(adata, reference, config, wanted) as gathered:
            model, seed = self._trained(), config.seed.global_seed
            asked, imputed, method = impute_query(model.module, gathered, wanted, seed)
        return imputed_anndata(adata, gathered, asked, imputed, method)

    def predict_labels(self, adata: Any, *, reference: Any = None, **keywords: Any) -> np.ndarray:
        """Predict the type of every cell, with calibrated probabilities.

        Writes obs["cell_type_pred"], obs["cell_type_probability"],
        obsm["cell_type_probabilities"], a column for each type, and their names and the accuracy
        on left-out cells into uns["cell_type_probabilities"].

        Parameters
        ----------
        adata
            Cells with counts; with coordinates, their surroundings count, too.
        reference
            An AnnData of more cells whose types are known, in the column that training took them
            from.
        **keywords
            `seed`, and settings.

        Returns
        -------
        numpy.ndarray
            The name of each cell's most probable type.
        """
        config = updated(self.config, keywords)
        with self._gathered(adata, reference, config, ()) as gathered:
            labels = label_query(self._trained().module, gathered, config.seed.global_seed)
        scratch = AnnData(obs=adata.obs[[]])
        put_labels(scratch, labels)
        for slot in ("obs", "obsm", "uns"):
            put_quietly(adata, slot, dict(getattr(scratch, slot)))
        return scratch.obs["cell_type_pred"].astype(str).to_numpy()

    @contextmanager
    def _gathered(
        self, adata: Any, reference: Any, config: Config, wanted: Sequence[str] | None
    ) -> Iterator[Gathered]:
        """Read the cells and the reference as the command does."""
        model = self._trained()
        with self._file_of(require_anndata(adata, "adata"), config) as (path, reading):
            query = Source(path, reading)
            if reference is None:
                yield gather(model.module, model.genes, query, None, [self._folder], wanted)
                return
            with self._file_of(reference, config, "reference") as (other, options):
                known = Source(other, options)
                yield gather(model.module, model.genes, query, known, [self._folder], wanted)
