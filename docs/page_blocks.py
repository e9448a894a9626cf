"""The code blocks of a page: Markdown enters; blocks leave, and can be run in a folder.

A block that cannot be run everywhere stands below a comment that says why:
<!-- not run: needs a GPU -->
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+?) -->\n+)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
PROGRAM = "alphastomics"


class Block(NamedTuple):
    """One fenced block: its language ("" for none), its text, its line, and why it is not run."""

    language: str
    text: str
    line: int
    why_not_run: str | None


def changed(page: str, changes: Mapping[str, str]) -> str:
    """Replace words of a page, all of which must be there."""
    for old, new in changes.items():
        if old not in page:
            raise ValueError(f"the page has no {old!r}")
        page = page.replace(old, new)
    return page


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    for match in FENCE.finditer(page):
        line = page.count("\n", 0, match.start("text")) + 1
        yield Block(match["language"], match["text"], line, match["why"])


def shell_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of every line of a shell, continued lines joined and comments dropped.

    Where lines begin with "$ ", these are the commands, and the others are what they printed.
    """
    lines = text.replace("\\\n", " ").splitlines()
    typed = [line.strip() for line in lines if line.lstrip().startswith("$ ")]
    for line in typed or lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words:
            yield words


def run_blocks(
    page: str, folder: Path, changes: Mapping[str, str], names: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run the blocks of a page in a folder, in order; return the names that Python has then.

    Parameters
    ----------
    page
        The page.
    folder
        Where to run it.
    changes
        Words to replace first, for a smaller run.
    names
        Names that Python has at the start.
    """
    known = dict(names or {})
    before = Path.cwd()
    os.chdir(folder)
    try:
        for block in blocks(changed(page, changes)):
            if block.why_not_run is None:
                run_block(block, known)
    finally:
        os.chdir(before)
    return known


def run_block(block: Block, names: dict[str, Any]) -> None:
    """Run one block in the working folder."""
    if block.language == "python":
        exec(compile(block.text, f"<block at line {block.line}>", "exec"), names)
    elif block.language == "yaml":
        name = block.text.splitlines()[0].removeprefix("# ")
        if name.endswith(".yaml"):
            Path(name).write_text(block.text)
    elif block.language in ("bash", "console"):
        for words in shell_lines(block.text):
            run_line(words)


def run_line(words: list[str]) -> None:
    """Run a line of a shell: our own program here, others where they are."""
    if words[0] != PROGRAM:
        subprocess.run(words, check=True)
        return
    from alphastomics.main import main

    if main(words[1:]):
        raise RuntimeError(f"failed: {shlex.join(words)}")
