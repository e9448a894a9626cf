"""The command line: the contract's commands, flags and defaults, frozen; and how it says no."""

import os
import subprocess
import sys

import pytest

from alphastomics.cli.flags import COMMANDS
from alphastomics.cli.parse import build_parser, flag_default, flag_help, parse_arguments
from alphastomics.config import Config
from alphastomics.config.file import document_fields
from alphastomics.config.section import is_auto
from alphastomics.errors import InputError
from alphastomics.main import answer, main

# The contract's section 2: command -> flag -> default as --help names it. Only additions are free.
SLICE_INPUT = {
    "input_dir": "required",
    "output_dir": "required",
    "config": "config.yaml in the working folder, if any",
    "position_key": "spatial",
    "position_is_3d": "off",
    "z_spacing": "10",
    "cell_type_key": "none",
    "skip-log-normalize": "off",
    "skip-scale": "off",
    "max_cells_per_file": "50000",
    "workers": "1",
}
SEEDS = {"seed": "42", "deterministic": "off"}
AUTO, AS_TRAINED = "auto: follows the data", "as in training"
CONTRACT = {
    "preprocess": SLICE_INPUT
    | SEEDS
    | {
        "gene_list_file": "the sorted union of all genes",
        "train_ratio": "0.8",
        "val_ratio": "0.1",
        "max_shard_size": "100000",
        "split_by": "cell",
        "layout": "shuffled",
        "storage": "dense",
    },
    "stage1": SLICE_INPUT | {"gene_list_file": "required"},
    "stage2": SEEDS
    | {
        "input_dirs": "required",
        "output_dir": "required",
        "train_ratio": "0.8",
        "val_ratio": "0.1",
        "max_shard_size": "100000",
        "split_by": "cell",
    },
    "train": SEEDS
    | {
        "config": "config.yaml in the working folder, if any",
        "data_dir": "./processed",
        "batch_size": AUTO,
        "epochs": AUTO,
        "lr": AUTO,
        "training_mode": "joint",
        "use_gated_attention": "on",
        "no_gated_attention": "off",
        "gate_type": "headwise",
        "use_moe": "off",
        "no_moe": "on",
        "num_experts": "4",
        "moe_top_k": "2",
        "enable_masking": "off",
        "disable_masking": "on",
        "expression_mask_ratio": "0.3",
        "position_mask_ratio": "0.33",
        "streaming": "off, unless the cells are too many for memory",
        "buffer_size": "50000",
        "resume": "none",
        "resume_from": "none",
        "test_after_train": "off",
        "output_dir": "./outputs",
        "exp_name": "alphastomics",
        "gpus": "1",
        "num_workers": "4",
        "fp16": "off",
        "precision": "auto",
        "strategy": "auto",
        "num_nodes": "1",
        "num_genes": "none",
    },
    "test": SEEDS
    | {
        "checkpoint": "required",
        "data_dir": "./processed",
        "batch_size": "65536; of a sample on a CPU 2048",
        "modes": "all that the checkpoint was trained for",
        "output": None,
        "overwrite": "off",
    },
    "report": SEEDS
    | {
        "checkpoint": "the best of the run",
        "data_dir": AS_TRAINED,
        "input_data": "--data_dir",
        "split": "test",
        "scores": "scored anew",
        "genes": "the most spatial ones",
        "output": "report.html in the run's folder",
        "overwrite": "off",
    },
    "sample": SEEDS
    | {
        "checkpoint": "required",
        "input_data": "required unless --num_cells is given",
        "num_cells": "as many as the input, or the neighbouring sections, have",
        "virtual_z": "none",
        "num_slices": "1",
        "reference": "centred positions",
        "landmarks": "centred positions",
        "anchors": "rows of the input's coordinates that are not NaN",
        "frame_scale": "off",
        "genes": "all that the model or the reference knows",
        "data_dir": AS_TRAINED,
        "sample_mode": None,
        "num_steps": AS_TRAINED,
        "sampler": None,
        "output": None,
    },
    "extract": SEEDS
    | {
        "checkpoint": "required",
        "data_dir": "./processed",
        "input_data": "--data_dir",
        "output": "embeddings.npz",
        "extract_mode": "auto",
        "format": "npz",
        "max_samples": "none",
        "batch_size": AS_TRAINED,
        "overwrite": "off",
    },
    "upload": {
        "data_dir": "required unless --checkpoint is given",
        "checkpoint": "required unless --data_dir is given",
        "license": "what the card on the Hub says, if any",
        "repo_id": "required",
        "private": "off",
        "token": "the usual Hub login",
    },
}
# What the contract's section 4 says of flags whose value follows the data: the schema's default.
NUMBERS = {
    ("train", "batch_size"): 1024,
    ("train", "epochs"): 100,
    ("train", "lr"): 1e-4,
    ("sample", "num_steps"): 50,
    ("extract", "batch_size"): 1024,
}
FLAGS = [(command, flag) for command, flags in CONTRACT.items() for flag in flags]


def spellings(command: str) -> dict:
    return {name: flag for flag in COMMANDS[command].flags for name in flag.spellings}


@pytest.mark.parametrize(("command", "flag"), FLAGS)
def test_every_flag_of_the_contract_is_known_with_its_default(command: str, flag: str):
    default = CONTRACT[command][flag]
    known = spellings(command)
    assert flag in known
    if default is not None:
        assert flag_default(known[flag]) == default
    assert "(default: " in flag_help(known[flag])


def test_a_flag_that_follows_the_data_keeps_the_number_of_the_contract_in_the_schema():
    assert set(NUMBERS) >= {
        (command, flag) for command, flag in FLAGS if is_shown_as_auto(command, flag)
    }
    for (command, flag), number in NUMBERS.items():
        field = document_fields()[spellings(command)[flag].path]
        assert is_auto(field)
        assert field.default == number


def is_shown_as_auto(command: str, flag: str) -> bool:
    return CONTRACT[command][flag] == AUTO


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_flag(command: str, capsys):
    with pytest.raises(SystemExit) as done:
        build_parser().parse_args([command, "--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    named = {
        name: flag.metavar if flag.positional else f"--{name}"
        for name, flag in spellings(command).items()
    }
    assert [name for name, spelling in named.items() if str(spelling) not in shown] == []


def required_arguments(command: str) -> list[str]:
    return [
        part
        for flag in COMMANDS[command].flags
        if flag.required
        for part in ([] if flag.positional else [f"--{flag.spellings[0]}"]) + ["somewhere"]
    ]


SAMPLE_VALUES = {
    "split": "train",
    "modes": "joint",
    "gate_type": "none",
    "training_mode": "joint",
    "split_by": "slice",
    "dims": "3",
    "num_cells": "9",
    "layout": "slice",
    "storage": "sparse",
    "precision": "bf16",
    "strategy": "ddp",
    "sample_mode": "joint",
    "sampler": "ddpm",
    "extract_mode": "encoder",
    "format": "h5",
    "num_experts": "8",
    "genes": "30",
    "batch_size": "8",
    "val_ratio": "0.2",
    "train_ratio": "0.5",
}


@pytest.mark.parametrize(("command", "flag"), FLAGS)
def test_underscores_and_hyphens_spell_the_same_flag(command, flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = spellings(command)[flag]
    value = [] if known.is_switch else [SAMPLE_VALUES.get(known.name, "1")]
    if flag == "config":
        (tmp_path / "1").write_text("")
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere/config.yaml").write_text("")
    calls = [
        parse_arguments([command, *required_arguments(command), spelled, *value])
        for spelled in (f"--{flag.replace('-', '_')}", f"--{flag.replace('_', '-')}")
    ]
    assert calls[0] == calls[1]
    assert known.name in calls[0].given


def test_a_flag_overrides_the_file_and_the_file_overrides_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("training: {learning_rate: 1e-3, max_epochs: 7}")
    training = parse_arguments(["train", "--epochs", "9"]).config.training
    assert (training.learning_rate, training.max_epochs, training.batch_size) == (1e-3, 9, 1024)


def test_config_yaml_of_the_working_folder_is_read_unless_another_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_arguments(["train"]).config == Config()
    (tmp_path / "config.yaml").write_text("training: {max_epochs: 7}")
    (tmp_path / "mine.yaml").write_text("training: {max_epochs: 8}")
    assert parse_arguments(["train"]).config.training.max_epochs == 7
    assert parse_arguments(["train", "--config=mine.yaml"]).config.training.max_epochs == 8


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        ("--no_gated_attention", "layer.attention", "linear"),
        ("--gate_type elementwise", "layer.gate", "elementwise"),
        ("--use_moe --num_experts 8", "layer.num_experts", 8),
        ("--enable_masking", "masking.enable", True),
        ("--fp16", "training.precision", "fp16"),
        ("--precision 32", "training.precision", "32"),
        ("--gpus 0", "distributed.devices", 0),
        ("--gpus auto", "distributed.devices", "auto"),
        ("--lr 1e-3", "training.learning_rate", 1e-3),
        ("--exp_name 123", "logging.exp_name", "123"),
        ("--streaming", "data.loading.streaming", True),
        ("--deterministic --seed 7", "seed.global_seed", 7),
        ("--num_genes 351", "model.num_genes", 351),
    ],
)
def test_a_flag_reaches_its_setting(arguments, path, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = parse_arguments(["train", *arguments.split()]).config
    for name in path.split("."):
        result = getattr(result, name)
    assert result == value


def test_skip_flags_switch_the_steps_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = parse_arguments(["preprocess", "--input_dir", "a", "--output_dir", "b", "--skip_scale"])
    assert not call.config.data.preprocessing.scale
    assert call.config.data.preprocessing.log_normalize


def test_a_mistake_in_the_file_is_named_by_the_file_even_when_a_flag_hides_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("training: {max_epochs: none}")
    assert main(["train", "--epochs", "3"]) == 2
    assert "config.yaml: training.max_epochs: expected a whole" in capsys.readouterr().err


def test_verbose_shows_the_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--lr", "fast", "--verbose"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("ALPHASTOMICS_DEBUG", "1")
    assert main(["train", "--lr", "fast"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_what_is_no_mistake_of_the_callers_is_status_1(monkeypatch, capsys):
    def broken(_call):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("alphastomics.main.run", broken)
    assert main(["config"]) == 1
    assert "RuntimeError: a fault of ours" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FileNotFoundError(2, "No such file or directory", "x.h5ad"), 2),
        (PermissionError(13, "Permission denied", "x"), 2),
        (OSError(28, "No space left on device", "shard"), 2),
        (OSError(5, "Input/output error", "shard"), 1),
        (ValueError("of a library"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_failure_has_its_status(error, status, monkeypatch, capsys):
    def broken(_call):
        raise error

    monkeypatch.setattr("alphastomics.main.run", broken)
    assert main(["config"]) == status
    assert capsys.readouterr().err.splitlines()[-1].startswith("alphastomics: ")


HEAVY = ("torch", "lightning", "anndata", "scanpy", "pandas", "pyarrow", "scipy", "sklearn", "h5py")


def modules_after(code: str) -> set[str]:
    code += "\nimport sys; sys.stderr.write('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["config"]])
def test_the_door_opens_without_heavy_imports(arguments: list[str]):
    code = f"""
from alphastomics.main import main
try:
    main({arguments})
except SystemExit:
    pass
"""
    assert modules_after(code).isdisjoint({*HEAVY, "matplotlib"})


def test_importing_the_package_imports_nothing_else():
    assert {name for name in modules_after("import alphastomics") if "." not in name}.isdisjoint(
        {*HEAVY, "matplotlib", "numpy", "pydantic", "yaml"}
    )


@pytest.mark.parametrize("module", ["alphastomics", "alphastomics.main"])
def test_both_module_spellings_are_the_program(module: str):
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("alphastomics ")


def test_bad_settings_are_input_errors():
    with pytest.raises(InputError):
        parse_arguments(["train", "--lr", "x"])


@pytest.mark.parametrize(("theirs", "turns"), [(None, "1000"), ("ACTIVE", None)])
def test_how_threads_wait_is_set_unless_the_user_did(monkeypatch, theirs, turns):
    # Set first, so that what the command sets is undone after the test.
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if theirs is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", theirs)
    assert answer(lambda: None) == 0
    assert os.environ["OMP_WAIT_POLICY"] == (theirs or "PASSIVE")
    assert os.environ.get("GOMP_SPINCOUNT") == turns
