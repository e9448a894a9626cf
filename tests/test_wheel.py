"""The wheel: it is built, installed into a clean environment, and does its work there.

The environment sees this one's libraries, since there may be no network; the package it has from
the wheel alone.
"""

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("hatchling")

ROOT = Path(__file__).parent.parent


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    command = ("-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", folder, ROOT)
    run(sys.executable, *command, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def program(built, tmp_path_factory) -> Callable[..., str]:
    """Run a program of the clean environment, away from the source, and return what it says."""
    place = tmp_path_factory.mktemp("clean")
    venv = place / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=place)
    (wheel,) = built.glob("*.whl")
    install = ("-m", "pip", "--python", venv / "bin" / "python", "install", "--no-deps")
    run(sys.executable, *install, "--no-index", "--quiet", wheel, cwd=place)
    (packages,) = venv.glob("lib/python*/site-packages")
    # A path in a .pth file is searched, but its own .pth files, such as that of an editable
    # install, are not read.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def say(name: str, *words: object) -> str:
        return run(venv / "bin" / name, *words, cwd=place).stdout

    return say


def test_the_wheel_has_all_files_of_the_package(built):
    (wheel,) = built.glob("alphastomics-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "alphastomics"
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {str(path.relative_to(ROOT)) for path in files} <= held
    assert {Path(name).suffix for name in held} >= {".py", ".js", ".css", ".html"}
    assert all(name.startswith(("alphastomics/", "alphastomics-")) for name in held)


def test_the_source_archive_has_what_building_and_testing_need(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "tests/conftest.py"}
    assert wanted <= names
    assert not [name for name in names if name.endswith((".h5ad", ".ckpt")) or ".venv" in name]


def test_the_installed_package_is_the_wheel(program):
    code = "import alphastomics; print(alphastomics.__file__, alphastomics.__version__)"
    place, version = program("python", "-c", code).split()
    assert "clean" in place
    assert f"alphastomics {version}" in program("alphastomics", "--version")


def test_the_installed_program_answers_and_simulates(program):
    assert "simulate" in program("alphastomics", "--help")
    small = ("--cells", 40, "--slices", 1, "--genes", 24)
    program("alphastomics", "simulate", "--output_dir", "slices", *small)
    code = "import anndata; print(anndata.read_h5ad('slices/slice_0.h5ad').n_obs)"
    assert program("python", "-c", code).strip() == "40"


def test_every_module_of_the_wheel_imports(program):
    code = (
        "import importlib, pkgutil, pathlib, alphastomics\n"
        "root = pathlib.Path(alphastomics.__file__).parent\n"
        "names = [m.name for m in pkgutil.walk_packages([str(root)], 'alphastomics.')]\n"
        # Kernels need Triton, which comes with CUDA; importing the program would run it.
        "skipped = ('_kernel', '__main__')\n"
        "for name in names:\n"
        "    if not name.endswith(skipped):\n"
        "        importlib.import_module(name)\n"
        "print(len(names))\n"
    )
    assert int(program("python", "-c", code)) > 80
