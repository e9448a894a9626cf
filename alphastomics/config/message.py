"""Words about settings: a field or a misspelt key enters, what was expected leaves."""

import difflib
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from alphastomics.config.section import LARGEST_COUNT, is_auto

# Names that users know from the flags, and the keys they stand for.
COMMON_NAMES = {
    "lr": "training.learning_rate",
    "epochs": "training.max_epochs",
    "num_epochs": "training.max_epochs",
    "clip": "training.gradient_clip_val",
    "data_dir": "data.processed_data_dir",
    "gpus": "distributed.devices",
    "output_dir": "logging.save_dir",
    "heads": "model.n_heads",
    "layers": "model.n_layers",
    "hidden_dim": "model.d_model",
}
TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
BOUND_WORDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}


def choices(annotation: Any) -> list[Any]:
    """Return the values a Literal allows, else nothing."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if type(None) in (parts := get_args(annotation)) and len(parts) == 2:
        annotation = next(part for part in parts if part is not type(None))
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return what a misspelt word is most like; None where nothing comes near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def words_of(field: FieldInfo) -> str | None:
    """Return a field's own words for what it takes, where its type does not say it."""
    extra = field.json_schema_extra
    return str(extra["expected"]) if isinstance(extra, dict) and "expected" in extra else None


def expectation(field: FieldInfo, given: object = None) -> str:
    """Say in words what a field takes; for a misspelt choice also which one was meant."""
    own_words = words_of(field)
    if own_words:
        return own_words
    allowed = choices(field.annotation)
    if allowed:
        words = "one of: " + ", ".join(_spelled(value) for value in allowed)
        meant = closest(str(given), map(str, allowed))
        return f"{words} (did you mean {meant}?)" if meant else words
    words, null, _ = _type_words(field.annotation).partition(" or null")
    return words + _bounds(field) + null + (" or auto" if is_auto(field) else "")


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type_words(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_type_words(part) for part in get_args(annotation))
    return "null" if annotation is types.NoneType else TYPE_WORDS.get(annotation, str(annotation))


def _bounds(field: FieldInfo) -> str:
    words = []
    for item in field.metadata:
        for name, word in BOUND_WORDS.items():
            bound = getattr(item, name, None)
            # The largest exact whole number is our limit, not one a user would care about.
            if bound is not None and bound != LARGEST_COUNT:
                words.append(f"{word} {bound:g}" if isinstance(bound, float) else f"{word} {bound}")
        if getattr(item, "min_length", None):
            words.append("that is not empty")
    return f" {' and '.join(words)}" if words else ""


def nearest_path(path: str, known: Iterable[str]) -> str:
    """Say which known key a misspelt one is nearest to."""
    paths = list(known)
    section, _, name = path.rpartition(".")
    if name in COMMON_NAMES:
        return f"did you mean {COMMON_NAMES[name]}?"
    if not section:
        sections = list(dict.fromkeys(other.partition(".")[0] for other in paths))
        near_section = closest(name, sections)
        if near_section:
            return f"did you mean the section {near_section}?"
    same_name = [other for other in paths if other.rpartition(".")[2] == name]
    cutoff = 0.0 if same_name else 0.6
    meant = closest(path, same_name or paths, cutoff)
    if meant is None:
        by_name = {other.rpartition(".")[2]: other for other in reversed(paths)}
        meant = by_name.get(closest(name, by_name, 0.7) or "")
    if meant is not None:
        return f"did you mean {meant}?"
    inside = [other for other in paths if section and other.startswith(f"{section}.")]
    listed = inside or list(dict.fromkeys(other.partition(".")[0] for other in paths))
    return f"known here: {', '.join(listed)}"
