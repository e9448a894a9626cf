"""Links between pages lead somewhere, and every page can be reached from the site's navigation."""

import posixpath
import re

import pytest
import yaml

from tests.docs.pages import OF_ROOT, PAGES, ROOT, site_pages, text_of, without_code

LINK = re.compile(r"\]\(([^)\s]+)\)")
SITE = site_pages.generated_pages()


def slugs(page: str) -> set[str]:
    """Anchors of a page that hold on GitHub and in the site alike."""
    headings = re.findall(r"^#+ +(.+?) *$", without_code(page), re.MULTILINE)
    kept = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    github = {text.replace(" ", "-") for text in kept}
    return github & {re.sub(r"[-\s]+", "-", text) for text in kept}


def local_links(name: str) -> list[str]:
    links = LINK.findall(without_code(text_of(name)))
    return [link for link in links if not link.startswith(("http://", "https://", "mailto:"))]


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(name: str):
    broken = []
    for link in local_links(name):
        target, _, anchor = link.partition("#")
        path = (PAGES[name].parent / target).resolve() if target else PAGES[name]
        if not path.is_file() or (anchor and anchor not in slugs(path.read_text("utf-8"))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("name", PAGES)
def test_prose_is_within_100_columns(name: str):
    lines = without_code(text_of(name)).splitlines()
    # Tables, indented blocks and pictures are as wide as they need; so is a lone command.
    prose = [line for line in lines if not line.startswith(("|", "    ", "![", "`python "))]
    assert [line for line in prose if len(line) > 100] == []


def nav_pages() -> list[str]:
    """The pages that mkdocs.yml lists, in order."""

    def walk(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        parts = node.values() if isinstance(node, dict) else node
        return [page for part in parts for page in walk(part)]

    return walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


def test_the_navigation_has_every_page_once():
    written = set(PAGES) - set(OF_ROOT)
    listed = nav_pages()
    assert sorted(listed) == sorted(written | set(SITE)), "mkdocs.yml: nav"


def test_pages_made_of_the_files_of_the_root_link_within_the_site():
    pages = (set(PAGES) - set(OF_ROOT)) | set(SITE)
    notebooks = sorted(site_pages.NOTEBOOKS.glob("*.ipynb"))
    pictures = {f"notebooks/{name}" for path in notebooks for name in site_pages.page_of(path)[1]}
    for position, page in SITE.items():
        folder = posixpath.dirname(position)
        links = [
            link if link.startswith("http") else posixpath.normpath(posixpath.join(folder, link))
            for link in (link.partition("#")[0] for link in LINK.findall(without_code(page)))
        ]
        outside = [
            link
            for link in links
            if not link.startswith("http")
            and link not in pages
            and link not in pictures
            and not (ROOT / "docs" / link).is_file()
        ]
        assert outside == [], position


def test_the_version_is_one():
    import alphastomics

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## \[(\d[^\]]*)\] - (\S+)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == citation["version"] == alphastomics.__version__
    assert newest[2] == str(citation["date-released"])
