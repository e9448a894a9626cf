"""The command line: arguments enter; a command, its `Config` and what is no setting leave.

`COMMANDS` is the whole interface. A flag that names a setting takes its help and default from the
schema; a flag that is not given leaves the file's value, and the file leaves the default.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from alphastomics.cli.flags import COMMANDS
from alphastomics.cli.schema import Command, Flag
from alphastomics.config import Config
from alphastomics.config.file import (
    document_fields,
    documented_defaults,
    parse_document,
    put,
    read_document,
)
from alphastomics.config.message import choices, closest, nearest_path
from alphastomics.config.section import is_auto
from alphastomics.errors import InputError

DEFAULT_CONFIG = Path("config.yaml")


@dataclass(frozen=True)
class Call:
    """What the user asked for: a command, the settings, and what else the command takes."""

    command: str
    config: Config
    arguments: argparse.Namespace
    given: frozenset[str]


# What settings come from, and what `main` looks for: no command asks for them.
OF_THE_PARSER = {"config", "set", "verbose"}
# Values of version 0.1 that a setting no longer takes, and what to give instead.
OLD_VALUES = {("sampling.estimator", "estimate"): "is now --estimator mean (the posterior mean)"}


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are exceptions, for the entry point to print in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print with its usage."""
        raise InputError(message.removeprefix("argument "))


class FlagHelp(argparse.HelpFormatter):
    """Help that stays within 100 columns and lets long flags fit."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)


def build_parser() -> OneLineParser:
    """Build the parser of all commands from `COMMANDS`."""
    from alphastomics import __version__

    parser = OneLineParser(
        prog="alphastomics",
        description="Generative spatial transcriptomics: predict where cells lie, predict "
        "expression at a position, generate tissue, embed cells.",
        formatter_class=FlagHelp,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"alphastomics {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", parser_class=OneLineParser
    )
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.summary,
            description=command.summary,
            formatter_class=FlagHelp,
            allow_abbrev=False,
        )
        _add_flags(subparser, command)
    return parser


def _add_flags(parser: argparse.ArgumentParser, command: Command) -> None:
    groups: dict[str, Any] = {}
    for flag in command.flags:
        target: Any = parser
        if flag.excludes is not None:
            if flag.excludes not in groups:
                groups[flag.excludes] = parser.add_mutually_exclusive_group()
            target = groups[flag.excludes]
        names = [f"--{spelling}" for spelling in flag.spellings]
        options: dict[str, Any] = {"help": flag_help(flag), "default": argparse.SUPPRESS}
        if flag.is_switch:
            options |= {"action": "store_true"}
        else:
            options |= {"metavar": flag.metavar or _metavar(flag)}
            if flag.kind is not None:
                options |= {"type": partial(_read_value, flag)}
            if flag.many:
                options |= {"nargs": "+", "action": "extend"}
        if flag.positional:
            target.add_argument(flag.name, **options)
        else:
            target.add_argument(*names, dest=flag.name, required=flag.required, **options)


def _read_value(flag: Flag, text: str) -> Any:
    """Read the text of a flag that is no setting."""
    refusal = argparse.ArgumentTypeError(f"expected {flag.expected}, got {text!r}")
    assert flag.kind is not None
    try:
        value = flag.kind(text)
    except ValueError as error:
        raise refusal from error
    if text == "" or (flag.minimum is not None and not value >= flag.minimum):
        raise refusal
    return value


def _metavar(flag: Flag) -> str:
    allowed = [] if flag.path is None else choices(document_fields()[flag.path].annotation)
    return "{" + ",".join(str(value) for value in allowed) + "}" if allowed else "VALUE"


def flag_help(flag: Flag) -> str:
    """Return a flag's help with its default."""
    words = flag.help
    if not words:
        assert flag.path is not None
        words = str(document_fields()[flag.path].description)
    return f"{words} (default: {flag_default(flag)})".replace("%", "%%")


def flag_default(flag: Flag) -> str:
    """Spell what happens when a flag is not given."""
    if flag.default is not None:
        return flag.default
    if flag.required:
        return "required"
    default = False if flag.path is None else documented_defaults()[flag.path]
    if flag.is_switch:
        return "on" if default == flag.value else "off"
    assert flag.path is not None
    if is_auto(document_fields()[flag.path]):
        return "auto: follows the data"
    if default is None:
        return "none"
    return f"{default:g}" if isinstance(default, float) else str(default)


def parse_arguments(argv: Sequence[str]) -> Call:
    """Parse the command line into a `Call`, or raise `InputError` with one clear line."""
    parser = build_parser()
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise InputError(f"unknown command {argv[0]!r}; {_nearest(argv[0], list(COMMANDS))}")
    arguments, unknown = parser.parse_known_args(_documented_spelling(argv))
    if arguments.command is None:
        raise InputError(f"no command given; choose one of: {', '.join(COMMANDS)}")
    command = COMMANDS[arguments.command]
    if unknown:
        flags = (flag for flag in command.flags if not flag.positional)
        names = [f"--{spelling}" for flag in flags for spelling in flag.spellings]
        # Without its value: that may be a token.
        name = unknown[0].partition("=")[0]
        hint = _setting_hint(name, names) or _nearest(name, names)
        raise InputError(f"{arguments.command}: unknown argument {name!r}; {hint}")
    given = frozenset(vars(arguments)) - {"command"}
    config = _resolve(command, arguments)
    return Call(arguments.command, config, _without_settings(command, arguments), given)


def _documented_spelling(argv: Sequence[str]) -> list[str]:
    """Replace --data-dir by --data_dir, and leave values alone."""
    documented = {
        spelling.replace("-", "_"): spelling
        for command in COMMANDS.values()
        for flag in command.flags
        for spelling in flag.spellings
    }
    spelled = []
    for token in argv:
        match = re.fullmatch(r"--([A-Za-z][\w-]*)(=.*)?", token, flags=re.DOTALL)
        if match:
            name = match[1].replace("-", "_")
            token = f"--{documented.get(name, match[1])}{match[2] or ''}"
        spelled.append(token)
    return spelled


def _setting_hint(name: str, known: list[str]) -> str | None:
    """Say how to give a setting that has no flag of its own."""
    last = name.lstrip("-").replace("-", "_")
    paths = [path for path in document_fields() if path.rpartition(".")[2] == last]
    if "--set" not in known or not paths:
        return None
    return f"it is a setting: give --set {' or '.join(f'{path}=VALUE' for path in paths)}"


def _nearest(word: str, known: list[str]) -> str:
    meant = closest(word, known)
    return f"did you mean {meant}?" if meant else f"known: {', '.join(known)}"


def _resolve(command: Command, arguments: argparse.Namespace) -> Config:
    """Overlay the file with the flags, and check the whole."""
    path = _config_path(command, arguments)
    document = {} if path is None else read_document(path)
    # The file by itself first: a flag must not hide a mistake in it.
    parse_document(document, str(path))
    origins: dict[str, str] = {}
    fields = document_fields()
    for flag in command.flags:
        if flag.path is None or flag.name not in arguments:
            continue
        given = getattr(arguments, flag.name)
        if (flag.path, given) in OLD_VALUES:
            raise InputError(f"--{flag.spellings[-1]} {given}: {OLD_VALUES[flag.path, given]}")
        value = flag.value if flag.is_switch else from_text(given, fields[flag.path])
        put(document, flag.path, value)
        origins[flag.path] = f"--{flag.spellings[0]}"
    for text in getattr(arguments, "set", []):
        setting, value = read_setting(text, fields)
        if setting in origins:
            raise InputError(f"--set {text}: {setting} is given twice ({origins[setting]})")
        put(document, setting, value)
        origins[setting] = f"--set {setting}"
    _refuse_gate_without_attention(document, origins)
    return parse_document(document, str(path) if path else "command line", origins)


def _config_path(command: Command, arguments: argparse.Namespace) -> Path | None:
    """Find the file of settings: the named one, that of the run, or the working folder's."""
    if "config" in arguments:
        return Path(arguments.config)
    if "run" in arguments:
        path = Path(arguments.run) / DEFAULT_CONFIG.name
        if not path.is_file():
            raise InputError(f"{arguments.run}: not the folder of a run (train makes one)")
        return path
    # `config` alone prints the defaults, whatever the working folder holds.
    idle = arguments.command == "config" and "data_dir" not in arguments
    is_default_read = command.reads_config and not idle and DEFAULT_CONFIG.is_file()
    return DEFAULT_CONFIG if is_default_read else None


def from_text(text: str, field: FieldInfo) -> Any:
    """Read a flag's text as the type of its field; what cannot be read stays text."""
    kind: Any = field.annotation
    # A choice among numbers: pydantic compares the text itself with them.
    named = {str(value): value for value in choices(kind) if not isinstance(value, str)}
    if text in named:
        return named[text]
    for constraint in field.metadata:
        kind = Annotated[kind, constraint]
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        return adapter.validate_strings(text, strict=False)
    except ValidationError:
        return {"true": True, "false": False}.get(text, text)


def read_setting(text: str, fields: dict[str, FieldInfo]) -> tuple[str, Any]:
    """Read KEY=VALUE of `--set`: the setting's path, and its value in the type of the setting."""
    path, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set {text}: expected KEY=VALUE, as in --set model.d_model=128")
    if path not in fields:
        same = next((known for known in fields if known.rpartition(".")[2] == path), None)
        hint = f"did you mean {same}?" if same else nearest_path(path, fields)
        raise InputError(f"--set {text}: unknown setting; {hint}")
    return path, from_text(value, fields[path])


def _refuse_gate_without_attention(document: dict[str, Any], origins: dict[str, str]) -> None:
    layer = document.get("TransformerLayer_setting") or {}
    asked = "TransformerLayer_setting.gate_type" in origins and layer["gate_type"] != "none"
    if asked and layer.get("use_gated_attention") is False:
        raise InputError(
            f"--gate_type {layer['gate_type']}: linear attention has no gate; "
            "add --use_gated_attention, or leave --gate_type out"
        )


def _without_settings(command: Command, arguments: argparse.Namespace) -> argparse.Namespace:
    """Keep what is left for the command; what is not given gets None, or False for a switch."""
    return argparse.Namespace(
        **{
            flag.name: getattr(arguments, flag.name, False if flag.is_switch else None)
            for flag in command.flags
            if flag.path is None and flag.name not in OF_THE_PARSER
        }
    )
