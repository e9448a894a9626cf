"""`AlphaSTomics`: slices as AnnData enter; a model, and what it says of other cells, leave.

The verbs are scverse's. Each takes the way of the command of the same task, so that data, settings
and seed decide the result, whichever entry point is used.
"""

import logging
import random
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from anndata import AnnData

from alphastomics.api.annotating import AnnotatingVerbs
from alphastomics.api.notebook import (
    for_notebooks,
    log_shown,
    logged_beside,
    losses_of,
    read_logged,
    score_frame,
)
from alphastomics.api.settings import Settings, updated, with_data_dir
from alphastomics.api.setup import (
    Setup,
    calling,
    check,
    common_dims,
    options_for,
    register,
    require_anndata,
    say_units,
    setup_for,
    to_remember,
    units_known,
    with_files_read,
    write_cells,
)
from alphastomics.config import Config, PreprocessingConfig
from alphastomics.config.file import parse_document, put, to_document
from alphastomics.diffusion_model.hub_model import (
    TRAINING_KEYS,
    TrainedModel,
    find_model,
    read_model,
)
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.diffusion_model.train import TrainRequest
from alphastomics.errors import InputError
from alphastomics.fit import fit
from alphastomics.generation.cells import InputCells, read_processed
from alphastomics.generation.commands import load_for_use
from alphastomics.generation.evaluate import evaluate
from alphastomics.generation.frame import Reference
from alphastomics.generation.sources import require_assignable
from alphastomics.generation.training_cells import MISSING_CELLS, NAME_FOLDER, training_cells
from alphastomics.preprocessing.commands import preprocess
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.query_fit import check_empty_cells

logger = logging.getLogger(__name__)

_KEYS = PreprocessingConfig()
INTERRUPTED = 130  # how `train` leaves after Ctrl-C


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Give the notebook its random states back: training sets them."""
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - to restore it
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)  # noqa: NPY002 - as above


@for_notebooks
class AlphaSTomics(AnnotatingVerbs):
    """A generative model of tissue: where cells sit, what they express, and new tissue.

    Parameters
    ----------
    adata
        Slices to train on, with counts and coordinates: an AnnData, the path of a file or of an
        instrument's folder, or several. Those without coordinates, beside slices, teach genes and
        types alone.
    settings
        Settings as in config.yaml: a dict, a `Config`, or the path of a file.
    folder
        Where the processed cells and the run are kept; None is a temporary folder, which goes
        with the model.
    **keywords
        Settings by the last part of their key, such as `d_model=128`, or by the flags of `train`,
        such as `lr=1e-3`.

    Attributes
    ----------
    config
        All settings.
    history
        Losses of training and validation: a table with step, epoch, name and value.
    logged
        Everything that was logged, the network's internals too, in the same form.
    """

    def __init__(
        self,
        adata: Any,
        settings: Settings = None,
        *,
        folder: str | Path | None = None,
        **keywords: Any,
    ) -> None:
        single = isinstance(adata, AnnData | str) or not isinstance(adata, Sequence)
        given = {"adata": adata} if single else {f"adata[{n}]": a for n, a in enumerate(adata)}
        if not given:
            raise InputError("adata: the list is empty; give at least one AnnData")
        # What was asked for: what follows from the data does so anew in each training.
        self.config = self._asked = updated(settings, keywords)
        parts = with_files_read(given, self.config)
        self._data = {name: require_anndata(part, name) for name, part in parts.items()}
        self._setups = {n: setup_for(part, self.config, n) for n, part in self._data.items()}
        self._dims = common_dims(self._data, self._setups, self.config.data.preprocessing)
        self._units_known = units_known(given, self.config)
        self._model: TrainedModel | None = None
        self.history = self.logged = pd.DataFrame()
        if folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="alphastomics-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        else:
            self._folder = Path(folder)
            if self._folder.exists() and not self._folder.is_dir():
                raise InputError(f"folder: {folder} is a file; name a folder for the run")
        self._is_own_folder = folder is None

    @classmethod
    def setup_anndata(
        cls,
        adata: Any,
        *,
        position_key: str | None = _KEYS.position_key,
        cell_type_key: str | None = _KEYS.cell_type_key,
        slice_key: str | None = None,
        layer: str | None = None,
    ) -> None:
        """Say where in an AnnData the cells are; the choices are kept in uns["alphastomics_setup"].

        Parameters
        ----------
        adata
            An AnnData to train on, or to predict for.
        position_key
            Key of obsm with the coordinates, two or three columns; None for dissociated cells.
        cell_type_key
            Column of obs with the cell types.
        slice_key
            Column of obs that names each cell's slice; None takes obs["slice_id"] where there is
            one, and else makes all cells one slice.
        layer
            Layer with the counts; None is X.
        """
        setup = Setup(position_key, cell_type_key, slice_key, layer)
        check(require_anndata(adata, "adata"), setup, "adata")
        register(adata, setup)

    def train(
        self,
        max_epochs: int | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        **keywords: Any,
    ) -> "AlphaSTomics":
        """Preprocess the slices and train; the best weights are kept. Returns the model itself.

        Parameters
        ----------
        max_epochs
            Passes over the training cells; None leaves `training.max_epochs`.
        resume
            Go on from the run's last checkpoint, if it has one.
        overwrite
            Replace a run and processed cells that are in the folder already.
        **keywords
            More settings, as for the constructor.
        """
        if not self._data:
            raise InputError("train: a model that was loaded has no slices; make one with them")
        if max_epochs is not None:
            keywords["max_epochs"] = max_epochs
        self._asked = updated(self._asked, keywords)
        self.config = self._with_folders(self._asked)
        with log_shown():
            say_units(self._setups, self._units_known)
        self._preprocess(overwrite=overwrite)
        request = TrainRequest("last" if resume else None, overwrite or self._is_own_folder)
        with (
            log_shown(),
            calling(self._folder / "processed", "adata"),
            untouched_randomness(),
            warnings.catch_warnings(),
        ):
            # Lightning 2.6 meets torch 2.13: its own business, and not a notebook's.
            warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
            try:
                summary = fit(self.config, request)
            except SystemExit as stop:
                if stop.code == INTERRUPTED:
                    raise KeyboardInterrupt("stopped; train(resume=True) goes on") from stop
                raise
            module, genes = load_for_use(Path(summary["best_checkpoint"]))
        record = {
            "training": {key: summary[key] for key in TRAINING_KEYS},
            "setup": asdict(to_remember(*self._first())),
        }
        if "verdict" in summary:
            record["verdict"] = summary["verdict"]
        self._model = TrainedModel(module, genes, record)
        self.config = module.config
        self.logged = read_logged(RunFolder(Path(summary["run"])).metrics)
        self.history = losses_of(self.logged)
        record["history"] = self.history.to_dict("list")
        return self

    def _first(self) -> tuple[AnnData, Setup]:
        """Return the first AnnData with coordinates, and where its cells are."""
        name = next(name for name, setup in self._setups.items() if setup.position_key is not None)
        return self._data[name], self._setups[name]

    def _with_folders(self, config: Config) -> Config:
        """Put the model's own folder, and the dimensions of its data, into the settings."""
        document = to_document(config, only_set=True)
        put(document, "data.preprocessing.position_is_3d", self._dims == 3)
        put(document, "data.processed_data_dir", str(self._folder / "processed"))
        put(document, "logging.save_dir", str(self._folder))
        return parse_document(document, "settings")

    def _preprocess(self, *, overwrite: bool) -> None:
        with tempfile.TemporaryDirectory(prefix="alphastomics-slices-") as scratch:
            # A name that stays: a processed folder knows its inputs by it.
            slices = Path(scratch) / "adata"
            slices.mkdir()
            for number, (name, data) in enumerate(self._data.items()):
                write_cells(slices / f"adata_{number:06d}.h5ad", data, self._setups[name])
            with calling(slices, "adata"):
                preprocess(
                    options_for(
                        self.config.data.preprocessing, list(self._setups.values()), self._dims
                    ),
                    input_dir=slices,
                    output_dir=self._folder / "processed",
                    gene_list_file=None,
                    seed=self.config.seed.global_seed,
                    overwrite=overwrite or self._is_own_folder,
                    scheduler=None,
                )

    def evaluate(self, adata: Any = None, *, anchors: Any = None, **keywords: Any) -> pd.DataFrame:
        """Score the model beside the baselines, as `alphastomics test` does.

        Parameters
        ----------
        adata
            Cells whose positions are known; None takes the test split of the training slices, or,
            without one, what the training held out to judge itself.
        anchors
            Cells of `adata` that are given, or a reference section, as `predict_positions` takes
            them: the others are scored, by them and without them.
        **keywords
            Settings of `sampling`, such as `num_steps`, and `seed`.

        Returns
        -------
        pandas.DataFrame
            Metrics in rows, modes and their methods in columns: `scores["expr_to_pos"]` is the
            table of a mode. `save` and `push_to_hub` put it into the card.
        """
        model, config = self._trained(), updated(self.config, keywords)
        known = section = None
        if anchors is not None and adata is None:
            raise InputError("anchors: are known beside cells to score: give adata, too")
        if anchors is None:
            require_assignable(config.sampling)
        if adata is not None:
            cells, section = self._scored_cells(adata, anchors, config)
            known = training_cells(model.module, model.genes, [self._folder])
            if known is None:
                where = model.module.config.data.processed_data_dir
                logger.warning(MISSING_CELLS + NAME_FOLDER, where)
        else:
            processed = self._folder / "processed"
            if not self._data:
                raise InputError("evaluate: a model that was loaded has no slices; give an AnnData")
            if DataFolder(processed).metadata().splits["test"].cells == 0:
                return self._held_out_scores()
            cells = read_processed(processed, model.genes, "test")
            known = read_processed(processed, model.genes, "train")
        seed = config.seed.global_seed
        scores = evaluate(model.module, cells, known, config.sampling, seed, section=section)
        model.record["scores"] = scores
        return score_frame(scores)

    def _scored_cells(
        self, adata: Any, anchors: Any, config: Config
    ) -> tuple[InputCells, Reference | None]:
        """Read cells to score, with what is known of them."""
        cells = self._cells(adata, config)
        check_empty_cells(cells.num_empty, len(cells), "adata")
        if anchors is None:
            return cells, None
        known = self._anchored(cells, adata, anchors, config)
        return known.cells, known.section

    def _held_out_scores(self) -> pd.DataFrame:
        """Return how the training judged itself: there are no test cells."""
        record = self._trained().record
        if "verdict" not in record:
            raise InputError(
                "evaluate: all cells were trained on; give an AnnData whose positions are known, "
                "or train with train_ratio=0.8"
            )
        record["scores"] = record["verdict"]["scores"]
        return score_frame(record["scores"])

    @classmethod
    def load(cls, folder: str | Path, data_dir: str | Path | None = None) -> "AlphaSTomics":
        """Read a model that `save` or `train` wrote; `data_dir`: its processed folder, if moved."""
        path = Path(folder)
        if not path.exists():
            raise InputError(f"{path}: there is no such folder; from_pretrained asks the Hub, too")
        with untouched_randomness():
            module, genes, record = read_model(path)
        if data_dir is not None:
            module.config = with_data_dir(module.config, data_dir)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        new = cls.__new__(cls)
        new.config = module.config
        new.logged = logged_beside(path)
        new.history = losses_of(new.logged)
        if new.history.empty and isinstance(record.get("history"), dict):
            new.history = pd.DataFrame(record["history"])
        new._data, new._setups = {}, {}
        new._dims = 3 if module.is_volume else 2
        new._folder, new._is_own_folder = path, False
        new._model = TrainedModel(module.to(device), genes, record)
        return new

    @classmethod
    def from_pretrained(
        cls, where: str | Path, *, token: str | None = None, revision: str | None = None
    ) -> "AlphaSTomics":
        """Read a model from a folder, or from the Hugging Face Hub.

        Parameters
        ----------
        where
            A folder, or owner/name on the Hub.
        token
            Access token; None takes the usual Hub login, if there is one.
        revision
            Branch, tag or commit on the Hub; None is the newest.
        """
        return cls.load(find_model(where, token=token, revision=revision))

    def __repr__(self) -> str:
        state = "not trained" if self._model is None else f"{len(self._model.genes)} genes, trained"
        return f"AlphaSTomics({state})"
