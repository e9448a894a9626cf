"""What a notebook shows: errors and hints in its own words, scores and history as tables."""

import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from alphastomics.api.settings import keyword_paths
from alphastomics.cli.flags import COMMANDS
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.errors import InputError

PACKAGE = "alphastomics"
LOSSES = ("train/", "val/")
HISTORY_COLUMNS = ["step", "epoch", "name", "value"]
# Where cells are is no setting of a notebook: each AnnData may have it elsewhere.
POSITION_SETTING = "--set data.preprocessing.position_key=KEY"
POSITION_CHOICE = "setup_anndata(adata, position_key=…)"
Class = TypeVar("Class", bound=type)


def in_python(message: str) -> str:
    """Spell the flags of a message as keywords: `--batch_size` becomes `batch_size=`."""
    message = message.replace(POSITION_SETTING, POSITION_CHOICE)
    keyword_of = {path: name for name, path in keyword_paths().items()}
    switches = {
        spelling: f"{keyword_of[flag.path]}={flag.value}"
        if flag.path in keyword_of
        else f"{flag.name}=True"
        for command in COMMANDS.values()
        for flag in command.flags
        for spelling in flag.spellings
        if flag.is_switch
    }

    def keyword(match: re.Match[str]) -> str:
        name, value = match[1], match[2] or ""
        if name == "resume":
            return "resume=True"
        return switches.get(name, f"{name.replace('-', '_')}={value.strip()}")

    return re.sub(r"--([a-z][a-z0-9_-]*)( last| [0-9][0-9.e-]*)?", keyword, message)


class PythonWords(logging.Filter):
    """Spells the flags in log messages as keywords."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the words of a record, and keep it."""
        record.msg, record.args = in_python(record.getMessage()), ()
        return True


@contextmanager
def log_shown() -> Iterator[None]:
    """Show what is logged where the user has configured no logging: plan, progress, verdict."""
    logger = logging.getLogger(PACKAGE)
    if logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def notebook_words() -> Iterator[None]:
    """Speak of keywords in what is logged, and raise one error with one traceback."""
    words = PythonWords()
    names = [name for name in logging.root.manager.loggerDict if name.startswith(PACKAGE)]
    for name in names:
        logging.getLogger(name).addFilter(words)
    try:
        yield
    except InputError as error:
        # What led to it is of no use to who made the mistake.
        raise InputError(in_python(str(error))) from None
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(words)


def plainly(act: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function speak to a notebook."""

    @functools.wraps(act)
    def spoken(*args: Any, **kwargs: Any) -> Any:
        with notebook_words():
            return act(*args, **kwargs)

    return spoken


def for_notebooks(cls: Class) -> Class:
    """Let all public methods of a class, and its constructor, speak to a notebook."""
    for name, attribute in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(attribute, classmethod):
            setattr(cls, name, classmethod(plainly(attribute.__func__)))
        elif callable(attribute):
            setattr(cls, name, plainly(attribute))
    return cls


def score_frame(scores: Mapping[str, Mapping[str, Mapping[str, float]]]) -> pd.DataFrame:
    """Lay scores out: metrics in rows, modes and their methods in columns.

    `frame["expr_to_pos"]` is the table of a mode, and `frame[mode][method][metric]` a number.
    """
    columns = {
        (mode, method): pd.Series(values, dtype=float)
        for mode, methods in scores.items()
        for method, values in methods.items()
    }
    if not columns:
        return pd.DataFrame()
    metrics = list(dict.fromkeys(metric for column in columns.values() for metric in column.index))
    frame = pd.DataFrame({key: column.reindex(metrics) for key, column in columns.items()})
    frame.columns.names, frame.index.name = ["mode", "method"], "metric"
    return frame


def read_logged(path: Path) -> pd.DataFrame:
    """Read everything that a run logged; an empty table where there is no file."""
    return pd.read_csv(path) if path.is_file() else pd.DataFrame(columns=HISTORY_COLUMNS)


def losses_of(logged: pd.DataFrame) -> pd.DataFrame:
    """Keep the losses, and what belongs to them: the rest is the network's internals."""
    kept = logged["name"].astype(str).str.startswith(LOSSES)
    return logged[kept].reset_index(drop=True)


def logged_beside(path: Path) -> pd.DataFrame:
    """Find what was logged in the run that a folder, or a checkpoint, is of."""
    folders = [RunFolder(folder) for folder in (path, path.parent, path.parent.parent)]
    metrics = next((run.metrics for run in folders if run.exists() and run.metrics.is_file()), None)
    return read_logged(path / "metrics.csv" if metrics is None else metrics)
