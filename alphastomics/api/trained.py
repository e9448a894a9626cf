"""What a trained model does: AnnData or coordinates enter; positions, expression, tissue leave.

Each verb takes the way of the command of the same task, so that data, settings and seed decide the
result, whichever entry point is used. Results stand under the keys that `sample` writes into files.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from jaxtyping import Float, Float32

from alphastomics.api.notebook import for_notebooks
from alphastomics.api.settings import document_of, updated
from alphastomics.api.setup import (
    Setup,
    calling,
    check,
    checked_coordinates,
    from_plain,
    options_for,
    put_quietly,
    require_anndata,
    require_whole,
    require_z,
    setup_for_use,
    write_cells,
)
from alphastomics.config import Config, ExtractConfig, Mode
from alphastomics.diffusion_model.hub_model import TrainedModel
from alphastomics.errors import InputError
from alphastomics.extract.files import OBSM_KEY, obsm_of, stored
from alphastomics.extract.h5ad import embed_h5ad_cells, encoder_alone
from alphastomics.extract.latents import log_mode, resolve_mode
from alphastomics.generation.cells import BARE_POSITIONS, Blank, InputCells, blank_cells
from alphastomics.generation.frame import Reference
from alphastomics.generation.generate import Generated
from alphastomics.generation.known_positions import (
    anchors_of_column,
    anchors_of_table,
    known_in_slice,
)
from alphastomics.generation.left_out import errors_in
from alphastomics.generation.output import (
    INTERVAL_KEYS,
    is_radius_key,
    new_anndata,
    put_counts,
    put_into,
)
from alphastomics.generation.predict import Predicted, predict_cells
from alphastomics.generation.sources import Known, anchors_or_section, check_slices, read_cells
from alphastomics.generation.training_cells import training_cells
from alphastomics.generation.virtual_sections import virtual_cells
from alphastomics.preprocessing.query_fit import LEAST_CELLS, check_empty_cells, require_enough
from alphastomics.tasks import EXPR_TO_POS, JOINT, POS_TO_EXPR, TASKS

_EXTRACT = ExtractConfig()


@for_notebooks
class TrainedVerbs:
    """The verbs of a model that is trained; `AlphaSTomics` adds how it comes to be.

    What users give is checked by hand, whatever its type, so that a mistake is one clear line.
    """

    config: Config
    _model: TrainedModel | None
    _dims: int
    _is_own_folder: bool
    _folder: Path

    @property
    def genes(self) -> list[str]:
        """Genes of the trained model, in its order."""
        return list(self._trained().genes)

    def _trained(self) -> TrainedModel:
        if self._model is None:
            raise InputError("the model is not trained yet: call train() first")
        return self._model

    def predict_positions(
        self, adata: Any, *, reference: Any = None, anchors: Any = None, **keywords: Any
    ) -> Float[np.ndarray, "N 2"] | Float[np.ndarray, "N 3"]:
        """Predict the positions of cells from their expression.

        Writes obsm["spatial_pred"], obsm["spatial_std"] and uns["alphastomics"]. Each slice is
        predicted by itself, centred, in the units of the training slices. With anchors, positions
        are in their frame and units, and obs["position_radius_90"] says how far off they may be.

        Parameters
        ----------
        adata
            Cells with counts. Genes that the model lacks are left out, those that the cells lack
            count as not measured.
        reference
            An AnnData in the frame that you want the positions in, such as an atlas slice;
            None leaves every slice centred, in the orientation of the training frame.
        anchors
            Cells of `adata` whose position is known: an AnnData with their coordinates, a table
            with the columns x, y and, in space, z, or the name of a column of obs that marks them.
            None takes the rows of the coordinates that are not NaN, where others are. An AnnData
            of other cells is a reference section of the tissue: positions come out in its frame.
        **keywords
            Settings of `sampling`, such as `estimator`, `num_steps` or `radius_level`, and `seed`.

        Returns
        -------
        numpy.ndarray
            The coordinates, a row per cell.
        """
        if reference is not None and anchors is not None:
            raise InputError("anchors, reference: give one of both: anchors are a frame")
        generated, cells = self._predict(adata, EXPR_TO_POS.name, keywords, reference, anchors)
        return generated.position[:, : cells.dims]

    def predict_expression(
        self, cells: Any, *, anchors: AnnData | None = None, **keywords: Any
    ) -> np.ndarray | AnnData:
        """Predict what cells express at their positions, on the scale of training.

        Parameters
        ----------
        cells
            An AnnData with coordinates, into which layers["generated"], layers["generated_std"],
            layers["generated_rate"] and uns["alphastomics"] are written; or coordinates alone,
            (N, 2) or (N, 3).
        anchors
            Known cells of the same slice, with expression and coordinates in the same frame:
            those around a position say what is expressed there. None takes the training cells,
            where the slice is one of theirs.
        **keywords
            Settings of `sampling`, such as `num_steps` or `num_samples`, and `seed`.

        Returns
        -------
        numpy.ndarray or anndata.AnnData
            For an AnnData, a row per cell and a column for each of `genes`; for coordinates, a new
            AnnData with the same keys.
        """
        if isinstance(cells, AnnData):
            return self._predict(cells, POS_TO_EXPR.name, keywords, None, anchors)[0].expression
        position = checked_coordinates(cells, "positions")
        require_enough(len(position), "positions")
        genes = self._trained().genes
        blank = replace(
            blank_cells(Blank(len(position)), len(genes), dims=position.shape[1]),
            position=np.pad(position, ((0, 0), (0, 3 - position.shape[1]))),
            slice_names=[BARE_POSITIONS],
        )
        check_slices(blank, self._trained().module)
        config = updated(self.config, keywords)
        known = None
        if anchors is not None:
            known = known_in_slice(blank, self._cells(anchors, config, "anchors"), "anchors")
        generated = self._generate(blank, POS_TO_EXPR.name, config, known=known).generated
        data = new_anndata(replace(blank, expression=generated.expression), genes)
        put_into(data, generated, blank, genes, POS_TO_EXPR.name)
        return data

    def generate(self, n: int | float, *, num_slices: int = 1, **keywords: Any) -> AnnData:
        """Make new tissue: expression and positions of cells that never were.

        Parameters
        ----------
        n
            Cells in a slice.
        num_slices
            Slices, each drawn by itself.
        **keywords
            Settings of `sampling`, such as `num_steps`, and `seed`.

        Returns
        -------
        anndata.AnnData
            X with counts, layers["normalized"] and obs["total_counts"] (of a model without counts
            X is expression as it was before standardising), layers["generated"] with standardised
            expression, obsm["spatial"] and obsm["spatial_pred"] with the positions,
            obs["slice_id"], and obs["cell_type"] where training cells have types.
        """
        genes = self._trained().genes
        require_whole("n", n, LEAST_CELLS)
        require_whole("num_slices", num_slices, 1)
        blank = blank_cells(Blank(int(n), int(num_slices)), len(genes), dims=3)
        config = updated(self.config, keywords)
        cells, generated, _ = self._generate(blank, JOINT.name, config, is_new=True)
        data = new_anndata(cells, genes)
        put_counts(data, generated, cells)
        put_into(data, generated, cells, genes, JOINT.name)
        return data

    def virtual_section(self, z: Any, n: int | None = None, **keywords: Any) -> AnnData:
        """Make a section where none was measured, between or beside sections in one frame.

        Parameters
        ----------
        z
            z of the section in the units of training, or several z_values.
        n
            Cells of a section; None: as many as its neighbours have.
        **keywords
            Settings of `sampling`, and `seed`.

        Returns
        -------
        anndata.AnnData
            X with counts, as `generate` returns them; layers["generated"] and
            layers["generated_std"] with the posterior mean at the same positions;
            obsm["spatial"], of 2D sections also obsm["spatial3d"]; obs["slice_id"].
        """
        z_values = require_z(z)
        if n is not None:
            require_whole("n", n, LEAST_CELLS)
        model, config = self._trained(), updated(self.config, keywords)
        return virtual_cells(model.module, model.genes, config, self._folder, z_values, n)[1]

    def get_latent_representation(
        self, adata: Any, *, mode: str = _EXTRACT.mode, **keywords: Any
    ) -> Float32[np.ndarray, "N D"] | Float32[np.ndarray, "N L D"]:
        """Embed cells, as `alphastomics extract` does.

        Writes obsm["X_alphastomics"]; for `all_layers` a key for each, obsm["X_alphastomics_0"], ….

        Parameters
        ----------
        adata
            Cells with counts; those without coordinates are embedded by expression alone.
        mode
            latent, niche, a hidden state (encoder, transformer, all_layers), or auto, the best one:
            `docs/embeddings.md` says what each is for.
        **keywords
            More settings, such as `seed`, which decides the cells that share a set.

        Returns
        -------
        numpy.ndarray
            A row per cell.
        """
        model = self._trained()
        config = updated({**document_of(self.config), "extract": {"mode": mode}}, keywords)
        chosen = resolve_mode(config.extract.mode, model.module)
        log_mode(config.extract.mode, chosen)
        trained = model.module.config
        set_size = trained.data.loading.set_size or trained.training.batch_size
        with self._file_of(adata, config) as (path, reading), encoder_alone(model.module, chosen):
            rows = path.with_name("rows")
            shape = embed_h5ad_cells(
                *(model.module, model.genes, path, reading, chosen, set_size, rows)
            )
            embeddings = np.array(stored(rows, shape))
        old = [key for key in adata.obsm if key == OBSM_KEY or key.startswith(f"{OBSM_KEY}_")]
        put_quietly(adata, "obsm", obsm_of(embeddings), dropped=old)
        return embeddings

    def _predict(
        self, adata: Any, mode: Mode, keywords: dict[str, Any], reference: Any, anchors: Any
    ) -> tuple[Generated, InputCells]:
        """Generate for an AnnData, bring it into a frame, and write the result into it."""
        config = updated(self.config, keywords)
        cells = self._cells(adata, config)
        if TASKS[mode] is EXPR_TO_POS:
            check_empty_cells(cells.num_empty, len(cells), "adata")
        frame = None if reference is None else self._frame(reference, config)
        known = section = None
        if anchors is not None and TASKS[mode] is EXPR_TO_POS:
            cells, _, section = self._anchored(cells, adata, anchors, config)
        elif anchors is not None:
            known = known_in_slice(cells, self._cells(anchors, config, "anchors"), "anchors")
        cells, generated, frame_fits = self._generate(
            cells, mode, config, frame=frame, known=known, section=section
        )
        scratch = AnnData(obs=adata.obs[[]], var=adata.var[[]])
        if "alphastomics" in adata.uns:
            scratch.uns["alphastomics"] = adata.uns["alphastomics"]
        put_into(scratch, generated, cells, self._trained().genes, mode, frame_fits)
        old = [name for name in adata.obs if TASKS[mode] is EXPR_TO_POS and is_radius_key(name)]
        put_quietly(adata, "obs", dict(scratch.obs), dropped=old)
        stale = [key for key in INTERVAL_KEYS if TASKS[mode].generates_expression]
        put_quietly(adata, "layers", {}, dropped=[key for key in stale if key in adata.layers])
        for slot in ("obsm", "layers", "uns"):
            put_quietly(adata, slot, getattr(scratch, slot))
        return generated, cells

    def _anchored(self, cells: InputCells, adata: AnnData, anchors: Any, config: Config) -> Known:
        """Take known positions from an AnnData, a table, or a column of obs, or a section."""
        if isinstance(anchors, str):
            return Known(anchors_of_column(cells, adata.obs, anchors))
        if isinstance(anchors, pd.DataFrame):
            return Known(anchors_of_table(cells, anchors))
        if not isinstance(anchors, AnnData):
            raise InputError(
                "anchors: expected an AnnData, a table with the columns x and y, or the name of a "
                f"column of obs, got {type(anchors).__name__}"
            )
        return anchors_or_section(cells, self._cells(anchors, config, "anchors"), "anchors")

    def _frame(self, reference: Any, config: Config) -> Reference:
        """Read a slice that lies in the frame."""
        cells = self._cells(reference, config, "reference")
        if cells.position is None:
            raise InputError("reference: has no coordinates; name them with setup_anndata")
        return Reference(Path("reference"), cells)

    def _generate(
        self,
        cells: InputCells,
        mode: Mode,
        config: Config,
        *,
        frame: Reference | None = None,
        known: InputCells | None = None,
        section: Reference | None = None,
        is_new: bool = False,
    ) -> Predicted:
        model = self._trained()
        if TASKS[mode].reads_training_cells and known is None:
            known = training_cells(model.module, model.genes, [self._folder])
        return predict_cells(
            *(model.module, cells, mode, config.sampling, config.seed.global_seed),
            known=known,
            frame=frame,
            section=section,
            errors=errors_in(model.record.get("verdict", {}), "the model's record"),
            is_new=is_new,
            near=[self._folder],
        )

    def _cells(self, adata: Any, config: Config, name: str = "adata") -> InputCells:
        """Read an AnnData as `sample` reads a file."""
        model = self._trained()
        with self._file_of(adata, config, name) as (path, reading):
            return read_cells(path, model.module, model.genes, reading, "")

    @contextmanager
    def _file_of(
        self, adata: Any, config: Config, name: str = "adata"
    ) -> Iterator[tuple[Path, Config]]:
        """Write an AnnData to a temporary file; yield it, and the settings to read it with."""
        settings, trained = config.data.preprocessing, self._trained_setup(config)
        setup = setup_for_use(require_anndata(adata, name), trained, settings)
        check(adata, setup, name, partial=True)
        options = options_for(settings, [setup], self._dims)
        data = config.data.model_copy(update={"preprocessing": options})
        with tempfile.TemporaryDirectory(prefix="alphastomics-cells-") as scratch:
            path = Path(scratch) / "adata.h5ad"
            write_cells(path, adata, setup)
            with calling(path, name):
                yield path, config.model_copy(update={"data": data})

    def _trained_setup(self, config: Config) -> Setup:
        """Return where the training cells were."""
        known = self._trained().record.get("setup")
        if known is not None:
            return from_plain(known, "record.json: setup")
        options = config.data.preprocessing
        return Setup(options.position_key, options.cell_type_key, None, None)
