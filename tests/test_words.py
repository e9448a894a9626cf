"""The project speaks the field's words: no private term in the package, the docs or the help.

A name is split into its words (`move_into_place`: move into place), and so are the keys in strings.
Comments, strings and pages are read as they stand.
"""

import ast
import io
import keyword
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from alphastomics.cli.parse import build_parser

ROOT = Path(__file__).parent.parent


class Term(NamedTuple):
    """A word that is not used, what to write instead, and a text that must be refused."""

    pattern: str
    instead: str
    sample: str
    names_only: bool = False


COUNTED = r"(?:an?|one|two|each|every|single|honest|another|per|several|the|more|of|all|few|\d+)"
TERMS = (
    Term(r"place|places|placed", "position, predicted position", "the place of a cell"),
    Term(r"spots?", "position", "a spot in the tissue"),
    Term(r"alike", "nearest neighbours in expression space", "cells that are alike"),
    Term(r"likest", "nearest neighbours in expression space", "the likest cells"),
    Term(r"turns?|turned|turning", "rotate, rotated", "the slice is turned"),
    Term(r"framed", "frame known", "framed slices"),
    Term(r"spreads?|spreading", "std; parallel strategy", "the spread of the samples"),
    Term(rf"{COUNTED}\s+draws?", "sample", "a draw from the posterior"),
    Term(r"draws", "samples", "draws", names_only=True),
    Term(r"honest", "calibrated", "an honest sample"),
    Term(r"teams?", "expert groups", "teams of experts"),
    Term(r"members?", "experts", "members", names_only=True),
    Term(r"visits?", "assignments", "visits", names_only=True),
    Term(r"lanes?", "padded size", "lanes of a tile"),
    Term(r"way\s+back", "backward", "the way back of a kernel"),
    Term(r"(?:come|go)\s+back", "forward, backward", "come_back", names_only=True),
    Term(r"told", "constants; said, separated", "new cells are told from real ones"),
    Term(r"seals?|sealed", "checksum", "the file is sealed"),
    Term(r"cards?", "metadata", "the card of a checkpoint"),
    Term(r"blows?", "interruption", "the run survives a blow"),
    Term(r"badness", "sort key", "sorted by badness"),
    Term(r"yardsticks?", "reference", "a yardstick for new tissue"),
    Term(r"crews?", "worker pool", "a crew of processes"),
    Term(r"receipts?", "completion marker", "the receipt of a part"),
    Term(r"surveys?|surveyed", "inspection", "the survey of the files"),
    Term(r"guards?|guarded", "subprocess reader", "the guard reads the file"),
    Term(r"heights", "z", "the heights of the slices"),
    Term(r"products?", "estimator", "both products of a run"),
    Term(r"body|bodies", "3D volume", "the slices of a body"),
    Term(r"flat\s+(?:tissues?|slices?|sections?|data)", "planar", "a flat tissue"),
    Term(r"doors?", "entry point", "one door for all commands"),
    Term(r"rooms?", "package", "types that cross rooms"),
    Term(r"walls?", "import rule", "a wall between packages"),
    Term(r"houses?", "project", "the rules of the house"),
    Term(r"drawers?", "catch-all", "utils is no drawer"),
    Term(r"way\s+of\s+a\s+batch", "data flow", "the way of a batch"),
    Term(r"by\s+heart", "overfits quickly", "slices are known by heart"),
    Term(r"chance\s+has\s+it", "random", "a frame as chance has it"),
    Term(r"as\s+(?:it|they)\s+lies?", "in its own orientation", "each slice as it lies"),
    Term(r"settled", "resolve_config", "settled", names_only=True),
)
# Assigned to, these say nothing: the noun itself is the name.
EMPTY_NAMES = {"found", "made", "one", "told", "settled"}
# Ordinary English, and words of other fields.
ALLOWED = (
    r"(?:in|into|takes?|took)\s+place",  # on the spot; happens; `move_into_place`
    r"decimal\s+places?",
    r"in\s+turn",
    r"turn(?:s|ed)?\s+(?:it\s+)?(?:on|off|out)",
    r"(?:dot|inner|outer|matrix|sparse|scalar)\s+products?",  # mathematics
    r"products\s+of\s+matrices",
    r"wall[\s-]+(?:clock|time)",
    r"(?:model|dataset|data)\s+cards?",  # the README.md of a repository on the Hub
    r"type\s+guard",  # Python's TypeGuard
)
HUB_CARD = "the README.md of a repository on the Hugging Face Hub is its card"
RENDERED = "HTML and CSS: the element <body>, the style of a card, numeric plotting terms"
BODY_KEY = 'obsm["body"] is a documented key of simulated slices'
# Path -> the terms that it may use, by their pattern, and why.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "alphastomics/io/hub.py": {"cards?": HUB_CARD},
    "alphastomics/diffusion_model/hub_model.py": {"cards?": HUB_CARD},
    "alphastomics/preprocessing/upload.py": {"cards?": HUB_CARD},
    "alphastomics/api/": {"cards?": HUB_CARD},
    "alphastomics/cli/flags.py": {
        "cards?": HUB_CARD,
        "products?": "--product stays a second name of --estimator",
    },
    "alphastomics/config/file.py": {"products?": "sampling.product is a key of version 0.1"},
    "alphastomics/attn_model/": {"products?": "products of matrices"},
    "alphastomics/attn_model/model.py": {"alike": "alike_in is the name in stored weights"},
    "alphastomics/report/": {"body|bodies": RENDERED, "cards?": RENDERED},
    "alphastomics/simulate.py": {"body|bodies": BODY_KEY},
    "docs/simulation.md": {"body|bodies": BODY_KEY},
    "CHANGELOG.md": {
        "products?": "the change of --product to --estimator",
        "spreads?|spreading": "the old names of the scores std_…",
    },
}


def words_of(name: str) -> str:
    """Split a name into its words: `OneLineParser` and `one_line_parser` alike."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name.replace("_", " ")).lower()


def blanked(match: re.Match[str]) -> str:
    """Replace a phrase by spaces, and keep its line breaks."""
    return re.sub(r"\S", " ", match[0])


def hits(text: str, *, is_name: bool = False) -> Iterator[tuple[Term, int, str]]:
    """Yield the terms that occur in a text, with the line and what was written."""
    plain = re.sub("|".join(ALLOWED), blanked, text.replace("_", " "), flags=re.IGNORECASE)
    for term in TERMS:
        if is_name or not term.names_only:
            for match in re.finditer(rf"\b(?:{term.pattern})\b", plain, re.IGNORECASE):
                yield term, plain.count("\n", 0, match.start()), match[0]


def pieces(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, is a name) of the names, comments and strings of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            yield token.start[0], words_of(token.string), True
        elif token.type not in {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.NEWLINE}:
            yield token.start[0], token.string, False


def empty_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of what is assigned, or taken as an argument, under an empty name."""
    for node in ast.walk(ast.parse(source)):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        if name in EMPTY_NAMES:
            yield node.lineno, name


def files(*patterns: str) -> list[str]:
    """List the project's files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = sorted(set(listed.stdout.split()))
    return [name for name in names if (ROOT / name).is_file()]


def excepted(name: str, term: Term) -> bool:
    """Say whether a file may use a term."""
    return any(name.startswith(path) and term.pattern in able for path, able in EXCEPTIONS.items())


def faults(name: str, source: str) -> list[str]:
    """List the private terms of a file, each with its line and what to write instead."""
    read = pieces(source) if name.endswith(".py") else [(1, source, False)]
    return [
        f"{name}:{first + line}: {written!r}: write {term.instead}"
        for first, text, is_name in read
        for term, line, written in hits(text, is_name=is_name)
        if not excepted(name, term)
    ]


PYTHON = files("alphastomics/**.py", "*.py", "docs/*.py", ":!tests", ":!benchmarks", ":!examples")
PAGES = files("alphastomics/**.js", "alphastomics/**.html", "docs/**.md", "*.md", "config.yaml")


@pytest.mark.parametrize("name", PYTHON + PAGES)
def test_a_file_uses_no_private_term(name: str):
    assert faults(name, (ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", PYTHON)
def test_what_is_assigned_is_named_by_a_noun(name: str):
    assert list(empty_names((ROOT / name).read_text(encoding="utf-8"))) == []


def test_the_help_uses_no_private_term():
    parser = build_parser()
    helps = [parser.format_help()]
    for action in parser._subparsers._group_actions:
        helps += [command.format_help() for command in action.choices.values()]
    assert len(helps) > 10
    allowed = set(EXCEPTIONS["alphastomics/cli/flags.py"])
    text = " ".join(helps)
    assert [w for term, _, w in hits(text) if term.pattern not in allowed] == []


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.sample)
def test_each_term_is_refused_in_names_comments_strings_and_pages(term: Term):
    name = re.sub(r"\W+", "_", term.sample)
    assert faults("alphastomics/new.py", f"{name} = 1\n")
    if not term.names_only:
        assert faults("alphastomics/new.py", f"x = 1  # {term.sample}\n")
        assert faults("alphastomics/new.py", f'"""Say it.\n\n{term.sample}\n"""\n')
        assert faults("alphastomics/new.py", f'x = f"{term.sample.title()}: {{1}}"\n')
        assert faults("docs/new.md", f"text\n{term.sample}.\n")


@pytest.mark.parametrize("name", sorted(EMPTY_NAMES))
def test_each_empty_name_is_refused(name: str):
    for source in (f"{name} = 1", f"def f({name}): ...", f"[{name} for {name} in ()]"):
        assert list(empty_names(source)) != []


@pytest.mark.parametrize(
    "text",
    [
        "sorted in place; it takes place; move_into_place",
        "placing cells, one of them, which was found and made",
        "the model card, wall time, a dot product, turned off",
        "draw cells at random; sets are drawn; training draws a time",
    ],
)
def test_ordinary_english_is_allowed(text: str):
    assert list(hits(text)) == []


def test_every_exception_is_needed():
    for path, able in EXCEPTIONS.items():
        text = {name: (ROOT / name).read_text("utf-8") for name in files(path)}
        for pattern in able:
            assert any(re.search(pattern, t, re.IGNORECASE) for t in text.values()), (path, pattern)
