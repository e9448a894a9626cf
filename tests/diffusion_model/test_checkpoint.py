"""Checkpoints: plain data, sealed, and refused in words when they are not what they should be."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from alphastomics.config import Config, SamplingConfig
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model import AlphaSTomicsModule
from alphastomics.diffusion_model.checkpoint import (
    CHECKSUM_KEY,
    OWN_KEY,
    ChecksummedCheckpointIO,
    digest,
    export_weights,
    load_module,
    model_metadata,
    plain,
    read_checkpoint,
    require_same_genes,
)
from alphastomics.errors import InputError
from alphastomics.generation.cells import Blank, blank_cells
from alphastomics.generation.generate import generate

GENES = ["a", "b", "c"]


def module() -> AlphaSTomicsModule:
    document = {"model": {"d_model": 8, "n_heads": 2, "n_layers": 1}}
    return AlphaSTomicsModule(parse_document(document, "test"), 3, position_scale=12.5)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    one = module()
    one.planar = True
    content = {
        "state_dict": one.state_dict(),
        "global_step": 4,
        OWN_KEY: model_metadata(one, GENES),
    }
    path = tmp_path / "one.ckpt"
    ChecksummedCheckpointIO().save_checkpoint(content, path)
    return path


def test_a_checkpoint_gives_back_the_module_to_the_bit(saved: Path):
    loaded, genes = load_module(saved)
    content = torch.load(saved, weights_only=True)
    assert genes == GENES
    assert float(loaded.position_scale) == 12.5
    assert loaded.planar
    assert loaded.config.model.d_model == 8
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value) for name, value in content["state_dict"].items())


def test_a_checkpoint_of_the_first_version_loads_and_samples(saved: Path):
    content = torch.load(saved, weights_only=True)
    del content[CHECKSUM_KEY]
    content[OWN_KEY] = {
        key: value
        for key, value in content[OWN_KEY].items()
        if key not in ("flat", "training_digest")
    }
    content["state_dict"] = {
        key: value for key, value in content["state_dict"].items() if "gene_curve" not in key
    }
    ChecksummedCheckpointIO().save_checkpoint(content, saved)
    loaded, genes = load_module(saved)
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value) for name, value in content["state_dict"].items())
    assert not state["model.trunk.gene_curve.mixing"].any()
    cells = blank_cells(Blank(12), len(genes), dims=2)
    new = generate(loaded.eval(), cells, "joint", SamplingConfig(num_steps=3), seed=0)
    assert np.isfinite(new.expression).all()
    assert np.isfinite(new.position).all()


def test_every_flipped_byte_of_the_weights_is_noticed(saved: Path):
    content = saved.read_bytes()
    needle = torch.load(saved, weights_only=True)["state_dict"]["model.trunk.position_out.weight"]
    start = content.index(needle.numpy().tobytes())
    for offset in (0, 5, 17):
        spoilt = bytearray(content)
        spoilt[start + offset] ^= 1
        saved.write_bytes(bytes(spoilt))
        with pytest.raises(InputError, match="altered"):
            read_checkpoint(saved)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused_in_one_line(saved: Path, share: float):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    with pytest.raises(InputError, match=str(saved)) as refusal:
        read_checkpoint(saved)
    assert "\n" not in str(refusal.value)


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def write_pickle(value: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(value))


@pytest.mark.parametrize("write", [torch.save, write_pickle])
def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path, write):
    mark, path = tmp_path / "mark", tmp_path / "evil.ckpt"
    write({"state_dict": Payload(mark)}, path)
    with pytest.raises(InputError, match=r"evil\.ckpt"):
        read_checkpoint(path)
    assert not mark.exists()


@pytest.mark.parametrize("content", [{"state_dict": {}}, [1, 2], torch.zeros(3)])
def test_a_file_of_another_program_is_refused(tmp_path: Path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(InputError, match="not a checkpoint of AlphaSTomics"):
        read_checkpoint(tmp_path / "other.pt")


def test_a_checkpoint_of_version_0_1_0_loads_and_predicts_as_it_did(tmp_path: Path):
    """It lacks the curves of genes, and says nothing of planes, styles and its training cells."""
    old = module().eval()
    kept = ("format", "version", "config", "genes", "position_scale", "normalization")
    metadata = {key: value for key, value in model_metadata(old, GENES).items() if key in kept}
    metadata["config"].pop("expression", None)  # a setting that came later
    weights = {name: value for name, value in old.state_dict().items() if "gene_curve" not in name}
    path = tmp_path / "old.ckpt"
    ChecksummedCheckpointIO().save_checkpoint({"state_dict": weights, OWN_KEY: metadata}, path)
    loaded, _ = load_module(path)
    assert loaded.config.num_latents == 0
    assert not loaded.planar
    cells = torch.randn(1, 5, 3), torch.randn(1, 5, 3), torch.full((1, 2), 0.5)
    mask = torch.ones(1, 5, dtype=torch.bool)
    # A curve of a new network is none, too.
    expected, found = (each.average(*cells, mask).expression for each in (old, loaded))
    torch.testing.assert_close(found, expected)


def test_a_later_format_is_refused_with_what_to_do(tmp_path: Path):
    metadata = {**model_metadata(module(), GENES), "format": 99}
    ChecksummedCheckpointIO().save_checkpoint(
        {"state_dict": {}, OWN_KEY: metadata}, tmp_path / "new.ckpt"
    )
    with pytest.raises(InputError, match=r"format 99; this version .* reads format 1"):
        read_checkpoint(tmp_path / "new.ckpt")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no such checkpoint"):
        read_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(InputError, match="is a folder"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (["a", "x", "c"], "at gene 2: 'b' in the checkpoint, 'x' in the data"),
        (["a", "b"], "at gene 3: 'c' in the checkpoint, None in the data"),
        (["a", "b", "c", "d"], "at gene 4: None in the checkpoint, 'd' in the data"),
        (["b", "a", "c"], "at gene 1"),
    ],
)
def test_other_genes_are_refused_with_the_first_difference(found, words):
    with pytest.raises(InputError, match=words):
        require_same_genes(GENES, found, Path("x.ckpt"), "data")
    require_same_genes(GENES, list(GENES), Path("x.ckpt"), "data")


def test_the_digest_sees_values_shapes_types_and_order():
    one = {"a": torch.zeros(2, 3), "b": [1, 2.0, None, "x"]}
    others = [
        {"a": torch.zeros(3, 2), "b": one["b"]},
        {"a": torch.zeros(2, 3, dtype=torch.float64), "b": one["b"]},
        {"a": one["a"], "b": [1, 2, None, "x"]},
        {"a": one["a"], "b": [2.0, 1, None, "x"]},
        {"a": torch.full((2, 3), 1e-30), "b": one["b"]},
    ]
    assert digest(one) == digest({"a": torch.zeros(2, 3), "b": [1, 2.0, None, "x"]})
    assert digest(one) not in {digest(other) for other in others}


def test_only_plain_data_is_written():
    assert plain({"p": Path("x"), "t": (1, 2)}) == {"p": "x", "t": [1, 2]}
    with pytest.raises(TypeError, match=r"checkpoint\.c: Config is no plain data"):
        plain({"c": Config()})


def test_the_export_holds_the_averaged_weights_and_their_card(tmp_path: Path):
    one = module()
    with torch.no_grad():
        one.model.trunk.position_out.weight.fill_(9.0)
    path = export_weights(one, GENES, tmp_path)
    exported = load_file(path)
    assert exported.keys() == one.average.state_dict().keys()
    assert not (exported["trunk.position_out.weight"] == 9.0).any()
    assert '"genes"' in (tmp_path / "config.json").read_text()
