"""Every code block of the README and the docs runs, or says beside it why it cannot.

Python and shell blocks are run in a small copy of what they name. Lines that are shown with their
output ($ ...), and lines of blocks that cannot be run, are read by the real command line.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from alphastomics.cli.flags import COMMANDS
from alphastomics.cli.parse import parse_arguments
from alphastomics.config.file import parse_document
from tests.docs import workshop
from tests.docs.pages import DOCS, PAGES, ROOT, page_blocks, text_of, without_code

import yaml  # isort: skip

pytest.importorskip("matplotlib")

# Numbers of the pages -> numbers for seconds, wherever they stand.
SMALLER = {
    "--cells 5000 --slices 4 --genes 300": "--cells 40 --slices 2 --genes 24",
    "--num_cells 4000": "--num_cells 40",
    "batch_size=1024": "batch_size=64",
    "set_size=256": "set_size=16",
    '"cuda"': '"cpu"',
}
# Run by their own tests, from beginning to end.
RUN_ELSEWHERE = {
    "tutorial.md": "test_tutorial",
    "README.zh-CN.md": "has the commands of README.md: test_readme",
    "report.md": "tests/report; README.md has the command too",
}
NOT_RUN_AT_MOST = 12
SHELL = ("bash", "console")


def blocks_of(page: str) -> list:
    return list(page_blocks.blocks(text_of(page)))


def smaller(text: str) -> str:
    for old, new in SMALLER.items():
        text = text.replace(old, new)
    return text


def shown_commands() -> list:
    """Every line of a shell in the pages, as words, with its page."""
    result = []
    for page in PAGES:
        text = text_of(page)
        shell = [block.text for block in blocks_of(page) if block.language in SHELL]
        shell += re.findall(r"^    \$ (?:.*\\\n)*.*$", text, flags=re.MULTILINE)
        result += [(page, words) for part in shell for words in page_blocks.shell_lines(part)]
    return result


def after_program(words: list[str]) -> list[str] | None:
    """The arguments that our program gets in a line of a shell; None if it is not in it."""
    if words[0] == "alphastomics":
        return words[1:]
    if words[0] in ("python", "torchrun", "srun") and "alphastomics" in words:
        return words[words.index("alphastomics") + 1 :]
    return None


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    before = Path.cwd()
    os.chdir(folder)
    try:
        workshop.build(folder)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def at_work(prepared, tmp_path, monkeypatch) -> Path:
    """The working folder is a copy: what a page writes, another does not see."""
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "agg")
    return folder


def run_words(words: list[str]) -> None:
    if words[0] == "make":
        require_make_target(words[1])
    else:
        page_blocks.run_line(words)


def require_make_target(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


TO_RUN = [
    page
    for page in PAGES
    if page not in RUN_ELSEWHERE
    and any(block.language in ("python", "bash") for block in blocks_of(page))
]


# Whatever matplotlib, scanpy and anndata say of one another is no matter of ours.
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("page", TO_RUN)
def test_every_block_of_a_page_runs(page, at_work):
    names = workshop.names_for(page)
    if "alphastomics train" in text_of(page):
        shutil.rmtree("outputs")  # a page that trains starts without a run
    if page == "simulation.md":
        shutil.rmtree("slices")  # it makes them
    for block in page_blocks.blocks(smaller(text_of(page))):
        if block.why_not_run is not None:
            continue
        if block.language == "python" and page != "README.md":  # test_readme has its five lines
            page_blocks.run_block(block, names)
        elif block.language == "bash":
            for words in page_blocks.shell_lines(block.text):
                run_words(words)


def test_every_command_that_is_shown_fits_the_command_line(at_work):
    shown = [(page, after_program(words)) for page, words in shown_commands()]
    ours = [(page, words) for page, words in shown if words is not None]
    assert len(ours) > 20
    for page, words in ours:
        # A value of the shell's own ($SLURM_NNODES) is a number by the time we see it.
        plain = ["2" if word.startswith("$") else word for word in words]
        if plain and not plain[0].startswith("-"):
            assert parse_arguments(plain).command in COMMANDS, page


def test_scripts_and_targets_that_are_shown_exist():
    for page, words in shown_commands():
        if words[0] == "make":
            require_make_target(words[1])
        scripts = [word for word in words if word.endswith(".py") and "/" not in word.strip("./")]
        for script in [word for word in words if re.fullmatch(r"(\w+/)*\w+\.py", word)] + scripts:
            assert (ROOT / script).is_file(), f"{page}: {script}"


def test_every_yaml_block_is_a_config():
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "yaml":
                parse_document(yaml.safe_load(block.text) or {}, f"{page}:{block.line}")


def test_blocks_that_are_not_run_say_why_and_are_few():
    unknown = [
        f"{page}:{block.line}"
        for page in PAGES
        for block in blocks_of(page)
        if block.language not in (*SHELL, "python", "yaml", "text", "")
    ]
    assert unknown == []
    reasons = [block.why_not_run for page in PAGES for block in blocks_of(page)]
    marked = [why for why in reasons if why]
    assert len(marked) <= NOT_RUN_AT_MOST
    # A comment that is not right above its block would be a promise that nobody reads.
    written = sum(text_of(page).count("\n<!-- not run:") for page in PAGES)
    assert written == len(marked)


def test_nothing_that_is_made_smaller_has_left_the_pages():
    everything = "".join(text_of(page) for page in PAGES)
    assert [old for old in SMALLER if old not in everything] == []


def test_a_block_is_read_with_its_line_and_its_reason():
    page = "# T\n\n<!-- not run: no GPU -->\n```bash\nhf x\n```\n"
    page += "\n<!-- not run: far -->\nword\n```\ny\n```\n"
    marked, plain = page_blocks.blocks(page)
    assert marked == page_blocks.Block("bash", "hf x\n", 5, "no GPU")
    assert plain == page_blocks.Block("", "y\n", 11, None)


def test_commands_are_separated_from_what_they_printed():
    shell = "a b \\\n  --c 'd e'  # why\n\n# alone\nf\n"
    assert list(page_blocks.shell_lines(shell)) == [["a", "b", "--c", "d e"], ["f"]]
    console = "$ a \\\n  b\nit isn't quoted\n$ c\n"
    assert list(page_blocks.shell_lines(console)) == [["a", "b"], ["c"]]


# Flags of other programs that the pages speak of.
FOREIGN = {
    *("nproc_per_node", "nnodes", "rdzv_backend", "rdzv_id", "rdzv_endpoint"),
    *("nodes", "ntasks-per-node", "gpus-per-node", "requeue", "signal", "kill-on-bad-exit"),
    *("host", "port", "nworkers", "nthreads"),
}


def flags_of_scripts() -> set[str]:
    scripts = [*ROOT.glob("*.py"), *DOCS.glob("*.py")]
    for folder in ("alphastomics", "benchmarks", "examples"):
        scripts += (ROOT / folder).rglob("*.py")
    sources = [path.read_text(encoding="utf-8") for path in scripts]
    return {flag for text in sources for flag in re.findall(r"\"--([a-z][\w-]*)\"", text)}


def test_every_flag_that_is_named_exists():
    known = {
        name for command in COMMANDS.values() for flag in command.flags for name in flag.spellings
    }
    known |= {"help", "version"} | FOREIGN | flags_of_scripts()
    for page in PAGES:
        if page == "CHANGELOG.md":
            continue
        named = set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", without_code(text_of(page))))
        assert named - known == set(), page
