"""Import rules: who may import whom, and how long a file may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "alphastomics"

# A package or module of the root -> what it may import. A new file is first written in here.
MAP = {
    "": {"io"},
    "errors": set(),
    "tasks": set(),
    "geometry": set(),
    "io": {"errors"},
    "config": {"errors", "tasks"},
    "simulate": {"", "config", "errors", "io"},
    "evaluation": {"errors", "geometry", "tasks"},
    "utils": {"errors", "evaluation"},
    "preprocessing": {"", "config", "errors", "io", "utils"},
    "config.plan": {"config", "preprocessing"},
    "config.auto": {"config", "config.plan", "preprocessing"},
    "attn_model": {"config", "errors", "geometry", "tasks", "utils"},
    "diffusion_model": {
        "",
        "attn_model",
        "config",
        "errors",
        "geometry",
        "io",
        "preprocessing",
        "tasks",
        "utils",
    },
    "generation": {
        "",
        "attn_model",
        "config",
        "diffusion_model",
        "errors",
        "evaluation",
        "geometry",
        "io",
        "preprocessing",
        "tasks",
        "utils",
    },
    "fit": {
        "config",
        "config.auto",
        "config.plan",
        "diffusion_model",
        "errors",
        "evaluation",
        "generation",
        "io",
        "preprocessing",
        "tasks",
    },
    "extract": {"config", "diffusion_model", "errors", "io", "preprocessing", "utils"},
    "report": {
        "",
        "attn_model",
        "config",
        "diffusion_model",
        "errors",
        "evaluation",
        "generation",
        "geometry",
        "io",
        "preprocessing",
        "tasks",
        "utils",
    },
    "pl": {"errors", "geometry", "preprocessing"},
    "cli": {"", "config", "errors"},
    "cli.demo": {
        "config",
        "diffusion_model",
        "evaluation",
        "fit",
        "generation",
        "preprocessing",
        "report",
        "simulate",
        "tasks",
    },
    "cli.commands": {
        "attn_model",
        "cli",
        "cli.demo",
        "config",
        "diffusion_model",
        "errors",
        "evaluation",
        "extract",
        "fit",
        "generation",
        "preprocessing",
        "report",
        "simulate",
        "tasks",
    },
    "api": {
        "",
        "cli",
        "config",
        "diffusion_model",
        "errors",
        "evaluation",
        "extract",
        "fit",
        "generation",
        "io",
        "preprocessing",
        "tasks",
    },
    "main": {"cli", "cli.commands", "errors", "io"},
    "__main__": {"main"},
}
# Modules with rules of their own: settings that follow from the data know the data, and commands
# know what they call, which the parser of the command line does not.
OWN_RULES = {"config.auto", "config.plan", "cli.commands", "cli.demo"}
# Module -> packages that must not be imported in it, at the top or within a function.
BARRED = {
    "diffusion_model": {"anndata", "scanpy", "pandas"},
    "attn_model": {"anndata", "scanpy", "lightning", "pyarrow", "pandas"},
    "simulate": {"torch", "scanpy"},
    "preprocessing": {"scanpy", "lightning"},
    "cli": {"torch", "anndata", "numpy"},
    "pl": {"anndata", "scanpy"},
}
# Those of preprocessing that batches, and so torch, belong to.
TORCH_IN_PREPROCESSING = {"batch_loader", "streaming", "sets", "memory", "resident"}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def package_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    if ".".join(relative.with_suffix("").parts) in OWN_RULES:
        return ".".join(relative.with_suffix("").parts)
    if len(relative.parts) > 1:
        return relative.parts[0]
    return "" if relative.stem == "__init__" else relative.stem


def imported_by(path: Path) -> set[str]:
    """Return every module that a file imports, wherever the import stands."""
    result = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            result.add(node.module)
    return result


def own_packages(path: Path) -> set[str]:
    packages = set()
    for name in imported_by(path):
        top, _, rest = name.partition(".")
        if top == "alphastomics":
            packages.add(rest if rest in OWN_RULES else rest.partition(".")[0])
    return packages - {package_of(path)}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_the_packages_of_the_map(path: Path):
    assert own_packages(path) <= MAP[package_of(path)]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_nothing_that_its_package_bars(path: Path):
    tops = {name.partition(".")[0] for name in imported_by(path)}
    barred = set(BARRED.get(package_of(path), set()))
    if package_of(path) == "preprocessing" and path.stem not in TORCH_IN_PREPROCESSING:
        barred |= {"torch"}
    if path.stem in TORCH_IN_PREPROCESSING:
        barred |= {"anndata", "h5py"}
    assert tops.isdisjoint(barred)


def test_the_map_has_no_cycle():
    order: list[str] = []
    rest = dict(MAP)
    while rest:
        free = [package for package, needs in rest.items() if needs <= set(order)]
        assert free, f"a cycle among {sorted(rest)}"
        order += free
        rest = {package: needs for package, needs in rest.items() if package not in free}


def test_utils_never_becomes_a_catch_all():
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
