"""The map in docs/architecture.md: every package is on it, and what is on it is there."""

import re

from tests.docs.pages import ROOT, text_of

PACKAGE = ROOT / "alphastomics"
PAGE = text_of("architecture.md")
NAMED = set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE))


def test_every_file_and_folder_of_the_package_is_on_the_map():
    files = {path.name for path in PACKAGE.glob("*.py")}
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert (files | folders) - NAMED == set()


def test_every_module_is_named_with_its_folder():
    modules = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.glob("*/*.py")
        if path.name != "__init__.py"
    }
    assert modules - NAMED == set()


def test_the_data_flow_stands_in_the_readme_alone():
    steps = re.findall(r"^\| \d+ \| `", PAGE, re.MULTILINE)
    assert steps == []
    assert "README.md#data-flow" in PAGE


def test_everything_on_the_map_is_there():
    there = {path.name for path in PACKAGE.rglob("*.py")}
    there |= {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    there |= {f"{path.parent.name}/" for path in PACKAGE.rglob("*/__init__.py")}
    there |= {f"{path.parent.relative_to(PACKAGE)}/" for path in PACKAGE.rglob("*/__init__.py")}
    there |= {path.name for path in (PACKAGE / "report").iterdir()}
    there |= {str(path.relative_to(ROOT)) for path in ROOT.glob("*.py")} | {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("*.py")
    }
    there |= {f"{path.relative_to(ROOT)}/" for path in ROOT.glob("*/*") if path.is_dir()}
    assert NAMED - there == set()
