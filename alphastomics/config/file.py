"""The documented configuration file: YAML or a dict enters, a `Config` leaves, and the inverse.

A document is the nested dict of the file. Its keys are the aliases of the schema's fields, where
they have one, and their names; three more are second names of settings in `model`.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from alphastomics.config import Config, Section
from alphastomics.config.message import choices, expectation, nearest_path, words_of
from alphastomics.config.section import is_auto
from alphastomics.errors import InputError, printable

LAYER_SECTION = "TransformerLayer_setting"
# Keys of version 0.1 -> the key of today, and what their values are called now.
OLD_KEYS = {"sampling.product": ("sampling.estimator", {"estimate": "mean"})}
# Second name in the file -> the setting itself.
SECOND_NAMES = {
    f"{LAYER_SECTION}.num_layers": "model.n_layers",
    f"{LAYER_SECTION}.num_heads": "model.n_heads",
    f"{LAYER_SECTION}.dropout": "model.dropout",
}
MAX_NODES = 10_000  # keys and values of a file, with what its aliases stand for
MAX_DEPTH = 8  # no documented key lies deeper than 3; a YAML anchor may contain itself

Document = dict[str, Any]


class ConfigLoader(yaml.SafeLoader):
    """Safe YAML that reads `1e-4` as a number and refuses a key that is given twice."""

    def construct_document(self, node: yaml.Node) -> Any:
        """Refuse aliases of aliases that stand for more than any memory can hold."""
        waiting, seen = [node], 0
        while waiting:
            seen += 1
            if seen > MAX_NODES:
                raise yaml.constructor.ConstructorError(
                    None, None, f"it stands for more than {MAX_NODES} values", node.start_mark
                )
            inner = waiting.pop().value
            if isinstance(inner, list):
                for item in inner:
                    waiting += item if isinstance(item, tuple) else [item]
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - the base class's signature
        """Refuse a repeated key: the base class would silently keep the last value."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def read_document(path: Path) -> dict[Any, Any]:
    """Read a YAML file into a document; an empty file is an empty document."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give a YAML file")
    if not path.is_file():
        raise InputError(f"{path}: no such configuration file")
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=ConfigLoader)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file in UTF-8; give a YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid YAML: {_one_line(error)}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InputError(
            f"{path}: expected sections such as 'training:' with keys below them, "
            f"got {type(document).__name__}"
        )
    return document


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())


@cache
def document_fields() -> dict[str, FieldInfo]:
    """Return each documented key path, in order, with the field of the schema behind it."""
    fields = dict(_fields_of(Config, ""))
    return fields | {second: fields[first] for second, first in SECOND_NAMES.items()}


def _fields_of(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _fields_of(field.annotation, f"{path}.")
        else:
            yield path, field


def put(document: Document, path: str, value: Any) -> None:
    """Put a value under its key path; what stands where a section belongs gives way."""
    *sections, name = path.split(".")
    for section in sections:
        if not isinstance(document.get(section), dict):
            document[section] = {}
        document = document[section]
    document[name] = value


def parse_document(
    document: Mapping[Any, Any], source: str, origins: Mapping[str, str] | None = None
) -> Config:
    """Parse a document into a `Config`, or say which key is wrong.

    Parameters
    ----------
    document
        The nested dict of the file.
    source
        What to call the document in an error, e.g. the file's name.
    origins
        Key paths that came from elsewhere, and what to call that, e.g. ``--lr``.
    """
    origins = origins or {}
    leaves = _leaves(document, source)
    values = _inner_values(leaves, source)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise InputError(_describe(error, leaves, source, origins)) from error


def _leaves(document: Mapping[Any, Any], source: str) -> Document:
    """Flatten a document to {key path: value}, refusing unknown keys and scalars for sections."""
    known = document_fields()
    sections = {path.rpartition(".")[0] for path in known} | {"data", "distributed"}
    leaves: Document = {}

    def walk(node: Mapping[Any, Any], prefix: str) -> None:
        for key, value in node.items():
            path = f"{prefix}{printable(str(key))}"
            if path in known:
                leaves[path] = value
            elif path in OLD_KEYS:
                new, meaning = OLD_KEYS[path]
                leaves.setdefault(new, meaning.get(str(value), value))
            elif path not in sections:
                wrong = _first_leaf(path, value)
                raise InputError(f"{source}: {wrong}: unknown key; {nearest_path(wrong, known)}")
            elif isinstance(value, Mapping):
                walk(value, f"{path}.")
            elif value is not None:
                raise InputError(
                    f"{source}: {path}: expected keys below it "
                    f"({_keys_below(path, known)}), got {value!r:.60}"
                )

    walk(document, "")
    return leaves


def _first_leaf(path: str, value: object) -> str:
    for _ in range(MAX_DEPTH):
        if not (isinstance(value, Mapping) and value):
            break
        key, value = next(iter(value.items()))
        path = f"{path}.{printable(str(key))}"
    return path


def _keys_below(section: str, known: Mapping[str, FieldInfo]) -> str:
    names = {
        path.removeprefix(f"{section}.").partition(".")[0]: None
        for path in known
        if path.startswith(f"{section}.")
    }
    return ", ".join(names)


def _inner_values(leaves: Document, source: str) -> Document:
    """Nest the values again, each under the setting's own name; what is `auto` is left out."""
    inner: Document = {}
    fields = document_fields()
    for path, value in leaves.items():
        target = SECOND_NAMES.get(path, path)
        if value == "auto" and is_auto(fields[path]):
            continue  # as if it were not there: config/auto.py resolves what is not set
        if target != path and target in leaves and not _same(leaves[target], value):
            raise InputError(
                f"{source}: {path} ({value!r}) and {target} ({leaves[target]!r}) are one setting "
                "with two values; keep one of the two keys, or make them equal"
            )
        put(inner, target, value)
    return inner


def _same(first: object, second: object) -> bool:
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def _describe(
    error: ValidationError, leaves: Document, source: str, origins: Mapping[str, str]
) -> str:
    """Say the first problem of a validation in one line, and how many more there are."""
    problems: dict[str, str] = {}
    fields = document_fields()
    for item in error.errors(include_url=False):
        path = _document_path(item["loc"], leaves)
        where = origins.get(path, f"{source}: {path}") if path else source
        if item["type"] == "value_error":
            problems.setdefault(path, f"{source}: {item['ctx']['error']}")
        elif path in fields:
            expected = expectation(fields[path], item["input"])
            problems.setdefault(path, f"{where}: expected {expected}, got {item['input']!r:.60}")
        else:
            problems.setdefault(path, f"{where}: {item['msg']}")
    first, *others = problems.values()
    return first if not others else f"{first} (and {len(others)} more)"


def _document_path(location: tuple[int | str, ...], leaves: Document) -> str:
    """Return the documented path of an error, as the user spelled it."""
    names = [str(part) for part in location]
    # A union adds the name of its branch to the location: cut it back to a documented path.
    fields = document_fields()
    while names and ".".join(names) not in fields and len(names) > 2:
        names.pop()
    path = ".".join(names)
    for second, first in SECOND_NAMES.items():
        if first == path and path not in leaves and second in leaves:
            return second
    return path


def as_config(config: Config | Mapping[str, Any]) -> Config:
    """Take the typed config, or a plain dict spelled like the file."""
    return config if isinstance(config, Config) else parse_document(config, "config")


def to_document(config: Config, *, only_set: bool = False) -> Document:
    """Return the document that reads back as `config`; on request without what was never set."""
    given = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if only_set:
        return given
    document = config.model_dump(mode="json", by_alias=True)
    was_set = _leaves(given, "config")
    for path, field in document_fields().items():
        if is_auto(field) and path not in was_set and path not in SECOND_NAMES:
            put(document, path, "auto")
    return document


def to_yaml(config: Config) -> str:
    """Return the YAML that reads back as `config`."""
    return yaml.safe_dump(to_document(config), sort_keys=False, allow_unicode=True)


def commented_yaml() -> str:
    """Return every documented key with its default and what it means: the project's config.yaml."""
    lines = ["# Every setting with its default. `alphastomics config` prints this file."]
    open_sections: list[str] = []
    defaults = documented_defaults()
    for path, field in _in_section_order(document_fields()):
        *sections, name = path.split(".")
        for depth, section in enumerate(sections):
            if sections[: depth + 1] != open_sections[: depth + 1]:
                lines += ([""] if depth == 0 else []) + [f"{'  ' * depth}{section}:"]
        open_sections = sections
        value = defaults[SECOND_NAMES.get(path, path)]
        setting = f"{'  ' * len(sections)}{name}: {yaml.safe_dump(value).splitlines()[0]}"
        lines.append(f"{setting:<42}# {_comment(path, field)}")
    return "\n".join(lines) + "\n"


def _in_section_order(fields: dict[str, FieldInfo]) -> list[tuple[str, FieldInfo]]:
    """Return the fields with second names beside the section they stand in."""
    sections = list(dict.fromkeys(path.partition(".")[0] for path in fields))
    return sorted(fields.items(), key=lambda item: sections.index(item[0].partition(".")[0]))


@cache
def documented_defaults() -> Document:
    """Return the default of each key path, as the file spells it."""
    return _leaves(to_document(Config()), "defaults")


def _comment(path: str, field: FieldInfo) -> str:
    if path in SECOND_NAMES:
        return f"The same setting as {SECOND_NAMES[path]}: change both, or delete this line."
    allowed = [str(value) for value in choices(field.annotation) if not isinstance(value, bool)]
    words = str(field.description)
    if is_auto(field):
        words += f" auto follows the data; without data it is {field.default!r}."
    if not allowed or words_of(field):
        return words
    return f"{words} [{' | '.join(allowed)}]"
