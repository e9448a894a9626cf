"""Pages of the site that are written elsewhere: the root's files, notebooks, and the reference.

A hook of mkdocs: the README, CONTRIBUTING and CHANGELOG stay where everybody looks for them, with
links that hold there; here they become pages, with links that hold in the site. The reference has a
page for each package, made from the docstrings. A notebook becomes a page with what it shows.
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs reads this file by its path

from notebook_pages import NOTEBOOKS, page_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "alphastomics"
PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Files of the root that no page is made of: their links become plain words.
UNPAGED = ("LICENSE", "CITATION.cff", "config.yaml")
PACKAGES = {
    "api": "The notebook",
    "preprocessing": "From slices to batches",
    "attn_model": "The network",
    "diffusion_model": "Noise, losses, training, sampling",
    "generation": "`sample` and `test`",
    "evaluation": "Metrics and baselines",
    "pl": "Pictures",
    "utils": "What several packages use",
}
# Files whose functions are Triton kernels: their arguments are pointers, of no use to a reader.
KERNELS = "_kernel"


def as_page(text: str) -> str:
    """Make the links of a file of the root links of the site."""
    text = re.sub(r"(\]\(|src=\")docs/", r"\1", text)
    for name, page in PAGES.items():
        text = text.replace(f"]({name}", f"]({page}")
    text = to_notebook_pages(text)
    for name in UNPAGED:
        text = re.sub(rf"\[([^\]]+)\]\({re.escape(name)}\)", r"\1", text)
    return text


def to_notebook_pages(text: str) -> str:
    """Let links to notebooks lead to their pages."""
    return re.sub(r"(\]\(notebooks/\w+)\.ipynb\)", r"\1.md)", text)


def modules_of(package: str) -> list[str]:
    """Name the modules of a package, its own file left out."""
    files = sorted((PACKAGE / package).glob("*.py"))
    names = [path.stem for path in files if path.stem != "__init__"]
    return [f"alphastomics.{package}.{name}" for name in names if not name.endswith(KERNELS)]


def reference(title: str, modules: list[str]) -> str:
    """Write a page that shows the docstrings of modules."""
    return f"# {title}\n\n" + "\n".join(f"::: {name}\n" for name in modules)


def generated_pages() -> dict[str, str]:
    """Return every generated page by its path in the site."""
    pages = {page: as_page((ROOT / name).read_text("utf-8")) for name, page in PAGES.items()}
    for package, title in PACKAGES.items():
        pages[f"reference/{package}.md"] = reference(title, modules_of(package))
    settings = ["alphastomics.config.schema", "alphastomics.config.data", "alphastomics.config.run"]
    pages["reference/config.md"] = reference("Settings", settings)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        pages[f"notebooks/{path.stem}.md"] = page_of(path).text
    return pages


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those of the folder (called by mkdocs)."""
    from mkdocs.structure.files import File

    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for name, picture in page_of(path).pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Make links to the README links to the first page (called by mkdocs)."""
    return to_notebook_pages(markdown.replace("](../README.md", "](index.md"))
