"""The map of the house: who may import whom, and how long a file may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "alphastomics"

# Room (a module, or a folder) -> the rooms it may import. A new file is first written in here.
MAP = {
    "": set(),
    "errors": set(),
    "files": {"errors"},
    "h5ad": {"files"},
    "progress": set(),
    "seeds": set(),
    "tasks": set(),
    "geometry": set(),
    "config_section": set(),
    "config_data": {"config_section"},
    "config_run": {"config_section"},
    "config": {"config_section", "config_data", "config_run", "tasks"},
    "config_message": {"config_section"},
    "config_file": {"config", "config_message", "config_section", "errors"},
    "config_auto": {"config", "preprocessing"},
    "cli_schema": set(),
    "cli_training": {"cli_schema"},
    "cli_flags": {"cli_schema", "cli_training"},
    "cli": {
        "",
        "cli_flags",
        "cli_schema",
        "config",
        "config_file",
        "config_message",
        "config_section",
        "errors",
    },
    "simulate": {"", "config", "errors", "files", "h5ad", "progress"},
    "evaluation": {"errors", "tasks", "geometry"},
    "utils": {"errors", "evaluation"},
    "hub": {"errors", "files"},
    "preprocessing": {"", "config", "errors", "files", "hub", "progress", "utils"},
    "attn_model": {"config", "errors", "utils", "tasks", "geometry"},
    "diffusion_model": {
        "",
        "attn_model",
        "config",
        "config_file",
        "errors",
        "files",
        "preprocessing",
        "progress",
        "seeds",
        "utils",
        "tasks",
        "geometry",
    },
    "fit": {
        "config",
        "config_auto",
        "config_file",
        "diffusion_model",
        "errors",
        "evaluation",
        "files",
        "generation",
        "preprocessing",
    },
    "generation": {
        "attn_model",
        "config",
        "diffusion_model",
        "errors",
        "evaluation",
        "files",
        "h5ad",
        "preprocessing",
        "progress",
        "tasks",
        "geometry",
    },
    "extract_files": set(),
    "extract": {
        "config",
        "diffusion_model",
        "errors",
        "extract_files",
        "files",
        "preprocessing",
        "progress",
        "seeds",
        "utils",
    },
    "hub_model": {"diffusion_model", "errors", "files", "hub", "preprocessing"},
    "api": {
        "cli_flags",
        "config",
        "config_file",
        "diffusion_model",
        "errors",
        "extract",
        "extract_files",
        "extract_h5ad",
        "fit",
        "generation",
        "h5ad",
        "hub",
        "hub_model",
        "preprocessing",
        "tasks",
    },
    "extract_h5ad": {
        "config",
        "diffusion_model",
        "errors",
        "extract",
        "extract_files",
        "files",
        "preprocessing",
        "progress",
        "seeds",
        "utils",
    },
    "report": {
        "",
        "attn_model",
        "config",
        "diffusion_model",
        "errors",
        "evaluation",
        "files",
        "generation",
        "preprocessing",
        "tasks",
        "geometry",
    },
    "demo": {
        "config",
        "config_file",
        "diffusion_model",
        "fit",
        "generation",
        "preprocessing",
        "report",
        "simulate",
        "tasks",
    },
    "synthetic": {"config", "preprocessing", "simulate"},
    "commands": {
        "attn_model",
        "cli",
        "cli_flags",
        "config_file",
        "demo",
        "diffusion_model",
        "errors",
        "evaluation",
        "extract",
        "extract_h5ad",
        "fit",
        "generation",
        "hub_model",
        "preprocessing",
        "report",
        "seeds",
        "simulate",
        "tasks",
    },
    "main": {"cli", "commands", "errors"},
    "__main__": {"main"},
}
# Module -> packages that must not be imported in it, at the top or within a function.
BARRED = {
    "diffusion_model": {"anndata", "scanpy", "pandas"},
    "attn_model": {"anndata", "scanpy", "lightning", "pyarrow", "pandas"},
    "simulate": {"torch", "scanpy"},
    "preprocessing": {"scanpy", "lightning"},
    "cli": {"torch", "anndata", "numpy"},
}
# Those of preprocessing that batches, and so torch, belong to.
TORCH_IN_PREPROCESSING = {"batch_loader", "streaming", "sets", "memory"}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    if len(relative.parts) > 1:
        return relative.parts[0]
    return "" if relative.stem == "__init__" else relative.stem


def imported_by(path: Path) -> set[str]:
    """Return every module that a file imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def own_rooms(path: Path) -> set[str]:
    rooms = set()
    for name in imported_by(path):
        top, _, rest = name.partition(".")
        if top == "alphastomics":
            rooms.add(rest.partition(".")[0])
    return rooms - {room_of(path)}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_the_rooms_of_the_map(path: Path):
    assert own_rooms(path) <= MAP[room_of(path)]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_nothing_that_its_room_bars(path: Path):
    tops = {name.partition(".")[0] for name in imported_by(path)}
    barred = set(BARRED.get(room_of(path), set()))
    if room_of(path) == "preprocessing" and path.stem not in TORCH_IN_PREPROCESSING:
        barred |= {"torch"}
    if path.stem in TORCH_IN_PREPROCESSING:
        barred |= {"anndata", "h5py"}
    assert tops.isdisjoint(barred)


def test_the_map_has_no_cycle():
    order: list[str] = []
    rest = dict(MAP)
    while rest:
        free = [room for room, needs in rest.items() if needs <= set(order)]
        assert free, f"a cycle among {sorted(rest)}"
        order += free
        rest = {room: needs for room, needs in rest.items() if room not in free}


def test_utils_never_becomes_a_drawer():
    files = {path.name for path in (PACKAGE / "utils").glob("*.py")}
    assert files <= {"__init__.py", "dataholder.py", "metrics.py"}


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]


def test_no_file_is_longer_than_400_lines():
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert long == {}


def test_no_function_of_the_package_is_longer_than_60_lines():
    long = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60:
                long.append(f"{path.name}:{node.name}")
    assert long == []


def test_data_commands_never_import_torch():
    code = (
        "import alphastomics.preprocessing.commands, alphastomics.simulate, sys; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_batches_never_import_anndata():
    code = (
        "import alphastomics.preprocessing.batch_loader, alphastomics.attn_model, sys; "
        "sys.exit(any(name in sys.modules for name in ('anndata', 'scanpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
