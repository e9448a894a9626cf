"""Files and folders that one may not read or write: one line that names them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.children import ROOT
from tests.faults.conftest import Tiny

# Root may do anything, unless it is told that it may not.
AS_ANYBODY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
SCRIPT = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from alphastomics.main import main
for name, argv in json.load(sys.stdin).items():
    err = io.StringIO()
    with redirect_stderr(err), redirect_stdout(io.StringIO()):
        status = main(argv)
    print(json.dumps([name, status, err.getvalue()]), flush=True)
"""


def attempts(tiny: Tiny, work: Path) -> dict[str, tuple[list[object], str]]:
    """Name what is forbidden: the command, and the name that it must tell."""
    model = ["--checkpoint", tiny.checkpoint, "--config", tiny.config]
    slices = ["--input_dir", tiny.slices]
    return {
        "slice": (
            ["preprocess", "--input_dir", work / "in", "--output_dir", work / "a"],
            "no.h5ad",
        ),
        "folder of slices": (
            ["preprocess", "--input_dir", work / "closed", "--output_dir", work / "a"],
            "closed",
        ),
        "output folder": (["preprocess", *slices, "--output_dir", work / "locked/out"], "locked"),
        "simulated": (["simulate", "--output_dir", work / "locked/out"], "locked"),
        "settings": (["info", "--num_genes", 5, "--config", work / "no.yaml"], "no.yaml"),
        "gene list": (
            ["stage1", *slices, "--output_dir", work / "a", "--gene_list_file", work / "no.yaml"],
            "no.yaml",
        ),
        "checkpoint": (
            ["sample", "--checkpoint", work / "no.ckpt", "--input_data", tiny.slice],
            "no.ckpt",
        ),
        "input": (["sample", *model, "--input_data", work / "in/no.h5ad"], "no.h5ad"),
        "sampled": (
            ["sample", *model, "--input_data", tiny.slice, "--output", work / "locked/a.h5ad"],
            "locked",
        ),
        "embedded": (
            ["extract", *model, "--data_dir", tiny.processed, "--output", work / "locked/a.npz"],
            "locked",
        ),
        "data": (["extract", *model, "--data_dir", work / "closed"], "closed"),
        "run": (["train", "--config", tiny.config, "--output_dir", work / "locked"], "locked"),
    }


def test_what_is_forbidden_is_named_in_one_line(tiny, work):
    runner = [sys.executable, "-c", SCRIPT]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may do anything here")
        runner = [*AS_ANYBODY, *runner]
    (work / "in").mkdir()
    shutil.copy(tiny.slice, work / "in/no.h5ad")
    shutil.copy(tiny.config, work / "no.yaml")
    shutil.copy(tiny.checkpoint, work / "no.ckpt")
    for name in ("in/no.h5ad", "no.yaml", "no.ckpt"):
        (work / name).chmod(0)
    (work / "closed").mkdir(mode=0)
    (work / "locked").mkdir(mode=0o500)
    asked = attempts(tiny, work)
    lines = {name: [str(word) for word in argv] for name, (argv, _) in asked.items()}
    ended = subprocess.run(
        runner,
        input=json.dumps(lines),
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [name for name, _, _ in found] == list(asked), ended.stderr
    for name, status, err in found:
        assert (name, status) == (name, 2), err
        assert "Traceback" not in err
        assert asked[name][1] in err.splitlines()[-1], name
    assert not (work / "a").exists()
    assert list((work / "locked").iterdir()) == []
