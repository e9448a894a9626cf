"""A step does not wait for the GPU, and a gradient that is not finite is heard of all the same."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch

from alphastomics.diffusion_model import AlphaSTomicsModule
from alphastomics.diffusion_model.gradient_check import CheckedStep, GradientCheck
from alphastomics.errors import InputError
from alphastomics.utils.dataholder import DataHolder
from tests.diffusion_model.test_module import config

STEPS = [CheckedStep(number, 0, []) for number in range(4)]


def test_bad_steps_are_named_in_their_order_and_once():
    check = GradientCheck()
    for step, norm in zip(STEPS, (1.0, float("nan"), 2.0, float("inf")), strict=True):
        check.add(torch.tensor(norm), step)
    assert [check.first_bad() for _ in range(3)] == [STEPS[1], STEPS[3], None]


def test_an_optimizer_told_of_a_bad_gradient_changes_neither_weights_nor_its_state():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], 0.1, weight_decay=0.5, fused=True)
    weight.grad = torch.ones(3)
    optimizer.step()
    before, state = (
        weight.detach().clone(),
        {k: v.clone() for k, v in optimizer.state[weight].items()},
    )
    weight.grad = torch.full((3,), float("nan"))
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
    optimizer.step()
    assert torch.equal(weight, before)
    assert all(torch.equal(optimizer.state[weight][key], value) for key, value in state.items())


def counted_batch(device: str) -> DataHolder:
    """A batch as a loader makes it: the host knows its sets and that nothing is padded."""
    mask = torch.ones(2, 64, dtype=torch.bool)
    cells = DataHolder.of(torch.randn(2, 64, 6), 10 * torch.randn(2, 64, 3), mask)
    cells = replace(cells, smoothed=torch.randn(2, 64, 12), slice_id=torch.zeros(2, 64).long())
    return replace(cells.to(device), first_cells=(3, 70), real_cells=128)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("masked", [False, True])
def test_a_step_never_waits_for_the_gpu(masked: bool):
    settings = config(
        diffusion={"position_frame": "registered"},
        model={"d_model": 16, "n_heads": 2, "n_layers": 2, "smoothing_rounds": 2},
        loss={"position": "aligned"},
        masking={"enable": masked},
    )
    module = AlphaSTomicsModule(settings, 6, position_scale=10.0).cuda()
    module.slice_rotation = torch.eye(3, dtype=torch.float64, device="cuda")[None]
    optimizer = torch.optim.AdamW(module.model.parameters(), 1e-3, fused=True)
    cells = counted_batch("cuda")
    for first in (True, False):
        torch.cuda.set_sync_debug_mode("default" if first else "error")
        try:
            module.training_step(cells, 0).backward()
            norm = torch.nn.utils.clip_grad_norm_(module.model.parameters(), 1.0)
            module.gradient_check.add(norm, STEPS[0])
            optimizer.step()
            optimizer.zero_grad()
            module.gradient_check.first_bad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_batch_that_the_host_has_counted_is_scored_as_one_that_it_has_not():
    torch.manual_seed(0)
    module = AlphaSTomicsModule(config(), 6, position_scale=10.0)
    counted = counted_batch("cpu")
    numbers = torch.tensor([[3], [70]]) + torch.arange(64)
    plain = replace(counted, cell_id=numbers, first_cells=None, real_cells=None)
    scored = [module.score(cells, module.draw(cells, "test")) for cells in (counted, plain)]
    torch.testing.assert_close(scored[0].terms, scored[1].terms, rtol=0, atol=0)
    assert counted.padding_mask is None
    assert plain.padding_mask is not None
    assert counted.count_cells() == plain.count_cells() == 128


@pytest.mark.filterwarnings("ignore")
def test_no_checkpoint_is_made_behind_a_gradient_that_is_refused(tmp_path):
    """What a GPU has computed is known later: a run that goes on from there would skip the step."""

    class Late(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_args):
            module.gradient_check.waiting.append((torch.tensor(torch.nan), None, STEPS[3]))
            with pytest.raises(InputError, match="not finite at step 3"):
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    module = AlphaSTomicsModule(config(), 6, position_scale=10.0)
    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        callbacks=[Late()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader([counted_batch("cpu")], batch_size=None))
    assert list(tmp_path.iterdir()) == []
