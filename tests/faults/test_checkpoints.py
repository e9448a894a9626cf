"""Checkpoints and model folders that are not what they say, given to the commands that load one."""

import contextlib
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from alphastomics.diffusion_model.checkpoint import (
    CHECKSUM_KEY,
    OWN_KEY,
    digest,
    read_checkpoint,
    read_model_metadata,
)
from alphastomics.errors import InputError
from tests.faults.conftest import Tiny
from tests.faults.door import DONE, done, refused, require_no_accident

Content = dict


class Payload:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def loaders(tiny: Tiny, checkpoint: Path) -> dict[str, list[object]]:
    model, data = ["--checkpoint", checkpoint], ["--data_dir", tiny.processed]
    given = ["--input_data", tiny.slice, "--output", "made.h5ad"]
    return {
        "sample": ["sample", *model, "--config", tiny.config, *given],
        "extract": ["extract", *model, *data],
        "test": ["test", *model, *data],
        "report": ["report", tiny.run, *model, *data, "--output", "made.html"],
        "resume": ["train", "--config", tiny.config, "--resume", checkpoint],
    }


def set_own(**values: object) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        content[OWN_KEY] = {**content[OWN_KEY], **values}

    return change


def drop(key: str) -> Callable[[Content], None]:
    return lambda content: content[OWN_KEY].pop(key)


def other_weights(content: Content) -> None:
    name = next(iter(content["state_dict"]))
    content["state_dict"][name] = torch.zeros(3, 3)


def weight_gone(content: Content) -> None:
    content["state_dict"].popitem()


# Each is sealed again afterwards: the seal tells of accidents, not of intent.
CHANGES: dict[str, Callable[[Content], object]] = {
    "another format": set_own(format=99),
    "format of text": set_own(format="1"),
    "fewer genes": lambda c: c[OWN_KEY]["genes"].pop(),
    "other genes": lambda c: c[OWN_KEY]["genes"].reverse(),
    "genes of numbers": set_own(genes=list(range(20))),
    "no genes at all": set_own(genes=[]),
    "genes that are no list": set_own(genes=7),
    "genes missing": drop("genes"),
    "config missing": drop("config"),
    "config that is no mapping": set_own(config=[1, 2]),
    "config with an unknown key": set_own(config={"nonsense": 1}),
    "config of another network": set_own(config={"model": {"d_model": 64}}),
    "scale of zero": set_own(position_scale=0.0),
    "scale of NaN": set_own(position_scale=float("nan")),
    "scale of words": set_own(position_scale="big"),
    "scale missing": drop("position_scale"),
    "normalisation of words": set_own(normalization="yes"),
    "normalisation that lacks a key": set_own(normalization={"scale": True}),
    "weights of another shape": other_weights,
    "a weight gone": weight_gone,
    "no weights": lambda c: c.pop("state_dict"),
    "weights that are no mapping": lambda c: c.update(state_dict=[1]),
    "own part that is no mapping": lambda c: c.update({OWN_KEY: 5}),
    "weights of words": lambda c: c["state_dict"].update(dict.fromkeys(c["state_dict"], "w")),
}
# What only a resumed run reads.
RESUMED_CHANGES: dict[str, Callable[[Content], object]] = {
    "no loops": lambda c: c.pop("loops"),
    "loops of words": lambda c: c.update(loops={"fit_loop": "x"}),
    "no callbacks": lambda c: c.pop("callbacks"),
    "callbacks of words": lambda c: c.update(callbacks={"Keeper": "x"}),
    "a loss of words": lambda c: c["callbacks"]["Keeper"].update(lowest="low"),
    "no optimizer": lambda c: c.pop("optimizer_states"),
    "an optimizer of words": lambda c: c.update(optimizer_states=["x"]),
    "moments of words": lambda c: c["optimizer_states"][0]["state"][0].update(exp_avg="x"),
    "moments of another shape": lambda c: c["optimizer_states"][0]["state"][0].update(
        exp_avg=torch.zeros(3, 3, 3)
    ),
    "no schedule": lambda c: c.pop("lr_schedulers"),
    "an epoch of words": lambda c: c.update(epoch="x"),
}
# Genes go by their names, so another order is another model of the same genes, to all that can be
# told.
FINE = {("other genes", "sample")}


@pytest.mark.parametrize("command", ["sample", "resume"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_checkpoint_that_says_something_else_is_refused(name, command, tiny, door, work):
    content = torch.load(tiny.checkpoint, weights_only=True)
    content.pop(CHECKSUM_KEY)
    CHANGES[name](content)
    content[CHECKSUM_KEY] = digest(content)
    torch.save(content, work / "bad.ckpt")
    outcome = door(*loaders(tiny, work / "bad.ckpt")[command])
    if (name, command) in FINE:
        done(outcome)
    else:
        refused(outcome, "bad.ckpt")


@pytest.mark.parametrize("name", RESUMED_CHANGES)
def test_a_run_goes_on_from_no_checkpoint_whose_state_makes_no_sense(name, tiny, door, work):
    content = torch.load(tiny.checkpoint, weights_only=True)
    content.pop(CHECKSUM_KEY)
    RESUMED_CHANGES[name](content)
    content[CHECKSUM_KEY] = digest(content)
    torch.save(content, work / "bad.ckpt")
    line = loaders(tiny, work / "bad.ckpt")["resume"]
    require_no_accident(door(*line, "--epochs", 2))


@pytest.mark.parametrize("bit", range(0, 8 * 98, 7))
def test_a_flipped_bit_in_the_end_record_is_noticed_or_harmless(bit, tiny, work):
    content = bytearray(tiny.checkpoint.read_bytes())
    content[-1 - bit // 8] ^= 1 << bit % 8
    (work / "bad.ckpt").write_bytes(content)
    try:
        found = read_checkpoint(work / "bad.ckpt")
    except InputError as error:
        assert "bad.ckpt" in str(error)
    else:
        assert digest(found) == digest(read_checkpoint(tiny.checkpoint))


def test_a_compressed_checkpoint_is_refused_before_it_takes_memory(work, monkeypatch):
    with zipfile.ZipFile(work / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"]" + b"\x8c\x01aa" * 1_000_000)
    monkeypatch.setattr(torch, "load", lambda *_args, **_kwargs: pytest.fail("it was opened"))
    with pytest.raises(InputError, match="unpack to more"):
        read_checkpoint(work / "bomb.ckpt")


def test_a_checkpoint_of_small_objects_is_refused_before_it_takes_memory(work, monkeypatch):
    with zipfile.ZipFile(work / "bomb.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02(" + b"]" * (9 << 20) + b"l.")
    monkeypatch.setattr(torch, "load", lambda *_args, **_kwargs: pytest.fail("it was opened"))
    with pytest.raises(InputError, match="no tensors"):
        read_checkpoint(work / "bomb.ckpt")


def test_content_that_unfolds_is_refused(tiny, work):
    nested: list = []
    for _ in range(40):
        nested = [nested, nested]
    content = torch.load(tiny.checkpoint, weights_only=True)
    torch.save({**content, "extra": nested}, work / "unfolds.ckpt")
    with pytest.raises(InputError, match="more memory"):
        read_checkpoint(work / "unfolds.ckpt")
    wide = torch.ones(1).expand(10**12)
    torch.save({**content, "extra": wide}, work / "wide.ckpt")
    with pytest.raises(InputError, match="more memory"):
        read_checkpoint(work / "wide.ckpt")


SIZES = [
    {"n_layers": 400, "d_model": 8192},
    {"n_layers": 10**9},
    {"d_ff": 10**12},
    {"d_model": 10**9, "n_heads": 1},
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_model_folder_that_asks_for_a_huge_network_is_refused_at_once(size, tiny, door, work):
    shutil.copytree(tiny.export, work / "model")
    path = work / "model/config.json"
    card = json.loads(path.read_text())
    card["config"]["model"].update(size)
    card.pop(CHECKSUM_KEY)
    path.write_text(json.dumps({**card, CHECKSUM_KEY: digest(card)}))
    refused(door(*loaders(tiny, work / "model")["extract"]), "config.json")


def test_no_flipped_bit_of_a_model_folders_config_is_accepted(tiny, work):
    whole = tiny.export.joinpath("config.json").read_bytes()
    known = read_model_metadata(tiny.export / "config.json")
    for place in np.random.default_rng(0).integers(0, 8 * len(whole), 300):
        content = bytearray(whole)
        content[place // 8] ^= 1 << int(place % 8)
        (work / "config.json").write_bytes(content)
        with contextlib.suppress(InputError):
            assert read_model_metadata(work / "config.json") == known


@pytest.mark.parametrize("place", [0.001, 0.2, 0.5, 0.999])
@pytest.mark.parametrize("command", ["sample", "extract", "test", "report", "resume"])
def test_a_flipped_byte_is_noticed_or_harmless(command, place, tiny, door, work):
    content = bytearray(tiny.checkpoint.read_bytes())
    content[int(place * len(content))] ^= 0xFF
    (work / "bad.ckpt").write_bytes(content)
    outcome = door(*loaders(tiny, work / "bad.ckpt")[command])
    require_no_accident(outcome)
    if outcome.status == DONE:  # between two parts of the file lie bytes that nobody reads
        assert digest(read_checkpoint(work / "bad.ckpt")) == digest(
            read_checkpoint(tiny.checkpoint)
        )


@pytest.mark.parametrize("command", ["sample", "extract", "test", "report", "resume"])
@pytest.mark.parametrize("how", ["torch", "legacy", "pickle"])
def test_a_payload_is_never_run(command, how, tiny, door, work):
    mark = work / "mark"
    evil = {"state_dict": Payload(mark), OWN_KEY: {"format": 1}, CHECKSUM_KEY: ""}
    bad = work / "bad.ckpt"
    if how == "pickle":
        bad.write_bytes(pickle.dumps(evil))
    else:
        torch.save(evil, bad, _use_new_zipfile_serialization=how == "torch")
    refused(door(*loaders(tiny, bad)[command]), "bad.ckpt")
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists(), "the payload would not have worked"


def test_a_payload_in_a_file_of_cells_is_never_run(tiny, door, work):
    mark = work / "mark"
    torch.save({"expression": Payload(mark)}, work / "cells.pt")
    model = ("--checkpoint", tiny.checkpoint)
    refused(door("sample", *model, "--input_data", work / "cells.pt"), "cells.pt")
    assert not mark.exists()


CARDS = {
    "empty": "",
    "list": "[]",
    "not JSON": "{",
    "another format": None,
    "deep": "[" * 100_000,
    "NaN": "NaN",
}


@pytest.mark.parametrize("name", CARDS)
def test_a_model_folder_with_a_bad_card_is_refused(name, tiny, door, work):
    shutil.copytree(tiny.export, work / "model")
    card = json.loads((work / "model/config.json").read_text())
    text = CARDS[name] if CARDS[name] is not None else json.dumps({**card, "format": 99})
    (work / "model/config.json").write_text(text)
    refused(door(*loaders(tiny, work / "model")["extract"]), "config.json")


@pytest.mark.parametrize("change", ["genes", "position_scale", "normalization", "config", "flat"])
def test_a_model_folder_whose_card_lost_its_sense_is_refused(change, tiny, door, work):
    shutil.copytree(tiny.export, work / "model")
    card = json.loads((work / "model/config.json").read_text())
    (work / "model/config.json").write_text(json.dumps({**card, change: "nonsense"}))
    refused(door(*loaders(tiny, work / "model")["extract"]), "config.json")


TENSORS = {
    "no tensors": {},
    "text": {"expression": "words"},
    "a list": {"expression": [[1.0]]},
    "one axis": {"expression": torch.zeros(20)},
    "three axes": {"expression": torch.zeros(4, 20, 1)},
    "other genes": {"expression": torch.zeros(4, 3)},
    "NaN": {"expression": torch.full((4, 20), torch.nan)},
    "one cell": {"expression": torch.zeros(1, 20)},
    "no cell": {"expression": torch.zeros(0, 20)},
    "complex": {"expression": torch.zeros(4, 20, dtype=torch.complex64)},
    "sparse": {"expression": torch.eye(20).to_sparse()},
    "on no device": {"expression": torch.zeros(4, 20, device="meta")},
    "beyond float32": {"expression": torch.full((4, 20), 1e300, dtype=torch.float64)},
    "nothing": {"expression": None},
    "a list of tensors": [torch.zeros(4, 20), torch.zeros(4, 2)],
    "sparse positions": {"positions": torch.eye(2).to_sparse()},
    "infinite positions": {"positions": torch.full((4, 2), torch.inf)},
    "one coordinate": {"positions": torch.zeros(4, 1)},
    "one level too deep": {"cells": {"expression": torch.zeros(4, 20)}},
    "numbers for keys": {1: torch.zeros(4, 20)},
    "two lengths": {"expression": torch.zeros(4, 20), "positions": torch.zeros(5, 2)},
    "four coordinates": {"positions": torch.zeros(4, 4)},
    "a tensor alone": torch.zeros(4, 20),
    "a number": 3,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_file_of_tensors_that_are_no_cells_is_refused(name, tiny, door, work):
    torch.save(TENSORS[name], work / "cells.pt")
    model = ("--checkpoint", tiny.checkpoint, "--config", tiny.config)
    outcome = door("sample", *model, "--input_data", work / "cells.pt", "--output", "made.pt")
    refused(outcome, "cells.pt")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # such files stay about
def test_a_file_of_rounded_tensors_is_refused(tiny, door, work):
    rounded = torch.quantize_per_tensor(torch.ones(4, 20), 0.1, 0, torch.quint8)
    torch.save({"expression": rounded}, work / "cells.pt")
    model = ("--checkpoint", tiny.checkpoint, "--config", tiny.config)
    refused(door("sample", *model, "--input_data", work / "cells.pt"), "cells.pt")


ODD_TENSORS = {
    "learnt": lambda: torch.nn.Parameter(torch.ones(4, 20)),
    "with a gradient": lambda: torch.ones(4, 20, requires_grad=True),
    "turned": lambda: torch.ones(20, 4).T,
    "one row many times": lambda: torch.ones(1, 20).expand(4, 20),
}


@pytest.mark.parametrize("name", ODD_TENSORS)
def test_a_file_of_odd_tensors_works(name, tiny, door, work):
    torch.save({"expression": ODD_TENSORS[name]()}, work / "cells.pt")
    model = ("--checkpoint", tiny.checkpoint, "--config", tiny.config)
    done(door("sample", *model, "--input_data", work / "cells.pt", "--output", "made.pt"))


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.int32, torch.bool])
def test_a_file_of_tensors_of_other_numbers_works(kind, tiny, door, work):
    cells = {"expression": torch.ones(4, 20).to(kind), "positions": torch.rand(4, 2).to(kind)}
    torch.save(cells, work / "cells.pt")
    model = ("--checkpoint", tiny.checkpoint, "--config", tiny.config)
    done(door("sample", *model, "--input_data", work / "cells.pt", "--output", "made.pt"))
    made = torch.load(work / "made.pt", weights_only=True)
    assert np.isfinite(made["positions"].numpy()).all()
