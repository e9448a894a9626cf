"""The pages that the tests of the documentation read, and the rules they share."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import page_blocks  # noqa: E402, F401 - lives beside the pages, for scripts that stand there
import site_pages  # noqa: E402, F401

OF_ROOT = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = {name: ROOT / name for name in OF_ROOT} | {
    path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))
}


def text_of(name: str) -> str:
    return PAGES[name].read_text(encoding="utf-8")


def without_code(page: str) -> str:
    """A page without its blocks, where links and headings mean something else."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
