"""A recorded update moves weights and average as Lightning's own parts do, batch by batch."""

import gc
import weakref
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch

from alphastomics.diffusion_model import AlphaSTomicsModule
from alphastomics.diffusion_model.cuda_graph import WARM_UP, RecordingError
from alphastomics.diffusion_model.recorded_update import RecordedUpdates
from alphastomics.errors import InputError
from alphastomics.utils.dataholder import DataHolder
from tests.diffusion_model.test_module import config

GENES, CELLS = 6, 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def cell_batch(number: int, *, padded: bool) -> DataHolder:
    """A batch as a loader makes it: the host knows its sets and how many cells are real."""
    draw = torch.Generator().manual_seed(number)
    mask = torch.ones(2, CELLS, dtype=torch.bool)
    mask[1, CELLS // 2 :] = not padded
    cells = DataHolder.of(
        torch.randn(2, CELLS, GENES, generator=draw) * mask[..., None],
        10 * torch.randn(2, CELLS, 3, generator=draw) * mask[..., None],
        mask,
    )
    smoothed = torch.randn(2, CELLS, 2 * GENES, generator=draw)
    facts = {"first_cells": (number, 1000 + number), "real_cells": int(mask.sum())}
    return replace(cells, smoothed=smoothed, slice_id=torch.zeros(2, CELLS).long(), **facts)


class Recorded(AlphaSTomicsModule):
    """A module that updates by recorded updates on a CPU, too."""

    def on_train_start(self) -> None:
        """Record, whatever the device."""
        super().on_train_start()
        self.recorded_updates = RecordedUpdates(self, self.trainer.optimizers[0])

    def on_fit_end(self) -> None:
        """Note what was recorded, and whether it is given back at once."""
        self.recorded_kinds = list(self.recorded_updates.recordings)
        held = [weakref.ref(each) for each in self.recorded_updates.recordings.values()]
        gc.disable()
        super().on_fit_end()
        self.kept = [recording for each in held if (recording := each()) is not None]
        gc.enable()


def trained(
    kind: type,
    batches: list[DataHolder],
    device: str,
    *,
    layer: dict | None = None,
    masking: dict | None = None,
    **training,
) -> AlphaSTomicsModule:
    """Train a small network on some batches."""
    torch.manual_seed(0)
    settings = config(
        diffusion={"position_frame": "registered"},
        model={"d_model": 16, "n_heads": 2, "n_layers": 2, "smoothing_rounds": 2, "dropout": 0.2},
        loss={"position": "aligned"},
        training={"max_epochs": 1, **training},
        TransformerLayer_setting=layer or {},
        masking=masking or {},
    )
    module = kind(settings, GENES, position_scale=10.0)
    module.num_batches = len(batches)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    held_out = [cell_batch(100 + number, padded=number == 1) for number in range(2 * WARM_UP)]
    loaders = [torch.utils.data.DataLoader(part, batch_size=None) for part in (batches, held_out)]
    trainer.fit(module, *loaders)
    module.losses = {name: float(loss) for name, loss in trainer.callback_metrics.items()}
    return module


LAYERS = [
    {},
    {"use_moe": True, "num_experts": 2, "moe_top_k": 1, "moe_balance": "bias"},
]


# Some sets are masked, by ratios that grow: both change from step to step on the device.
MASKING = {
    "enable": True,
    "masking_probability": 0.5,
    "progressive_masking": True,
    "progressive_steps": 2 * WARM_UP,
}
KINDS = [*((layer, {}) for layer in LAYERS), ({}, MASKING)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("layer", "masking"), KINDS)
def test_weights_and_average_are_those_of_single_parts(device: str, layer: dict, masking: dict):
    batches = [cell_batch(n, padded=n % 3 == 1) for n in range(4 * WARM_UP)]
    parts = {"layer": layer, "masking": masking}
    recorded, plain = (trained(kind, batches, device, **parts)
                       for kind in (Recorded, AlphaSTomicsModule))  # fmt: skip
    start = trained(AlphaSTomicsModule, batches[:1], device, **parts)
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-4}
    for name, expected in plain.state_dict().items():
        # Positions are centred: the gradient of their bias is rounding, which AdamW makes large.
        if not name.endswith("position_out.bias"):
            found = recorded.state_dict()[name].cpu()
            torch.testing.assert_close(
                found, expected.cpu(), msg=lambda text, name=name: f"{name}: {text}", **tolerance
            )
    assert recorded.updates_done == int(recorded.updates) == len(batches)
    starts = start.average.parameters()
    pairs = zip(recorded.average.parameters(), starts, strict=True)
    assert any(not torch.equal(one, two) for one, two in pairs)
    assert recorded.kept == []
    assert len(recorded.recorded_kinds) == 4  # padded and whole, in training and validation
    assert recorded.losses == pytest.approx(plain.losses, rel=tolerance["rtol"])
    assert "val/loss" in recorded.losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
def test_an_infinite_gradient_leaves_the_weights_and_is_named(device: str):
    batches = [cell_batch(n, padded=False) for n in range(3 * WARM_UP)]
    bad = 2 * WARM_UP
    batches[bad] = replace(batches[bad], expression=batches[bad].expression * float("inf"))
    skipping = trained(Recorded, batches, device, on_nonfinite="skip")
    assert int(skipping.skipped_steps) == 1
    assert all(torch.isfinite(weight).all() for weight in skipping.parameters())
    with pytest.raises(InputError, match=f"not finite at step {bad}"):
        trained(Recorded, batches, device)


@pytest.mark.filterwarnings("ignore")
def test_a_batch_that_the_host_has_not_counted_is_updated_part_by_part():
    batches = [replace(cell_batch(n, padded=False), real_cells=None) for n in range(3)]
    recorded, plain = (trained(kind, batches, "cpu") for kind in (Recorded, AlphaSTomicsModule))
    assert {act for act, _ in recorded.recorded_kinds} == {"held_out"}
    assert recorded.updates_done == len(batches)
    for name, expected in plain.state_dict().items():
        assert torch.equal(recorded.state_dict()[name], expected), name


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_recorded_is_said_once_and_done_part_by_part(monkeypatch, caplog):
    def refusing(step, device, pool):
        def update() -> None:
            raise RecordingError("a sort waits for the GPU")

        return update

    batches = [cell_batch(n, padded=False) for n in range(3)]
    plain = trained(AlphaSTomicsModule, batches, "cpu")
    monkeypatch.setattr("alphastomics.diffusion_model.recorded_update.recorded", refusing)
    recorded = trained(Recorded, batches, "cpu")
    assert [record.message for record in caplog.records].count(
        "updates cannot be recorded as CUDA graphs, and will be slower: a sort waits for the GPU"
    ) == 1
    for name, expected in plain.state_dict().items():
        assert torch.equal(recorded.state_dict()[name], expected), name
