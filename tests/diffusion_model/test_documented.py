"""The contract's Python examples as written: any Trainer, coordinates in micrometres."""

import warnings
from pathlib import Path

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch

from alphastomics.attn_model import GatedSelfAttentionModel
from alphastomics.diffusion_model import (
    AlphaSTomicsModule,
    DiffusionSampler,
    DualModalLoss,
    MaskedDiffusionModule,
)
from alphastomics.diffusion_model.checkpoint import load_module
from alphastomics.generation import commands
from alphastomics.preprocessing.batch_loader import BatchLoader, create_dataloaders
from alphastomics.utils.dataholder import DataHolder
from tests.diffusion_model.conftest import tiny_config

CFG = {
    "model": {"d_model": 16, "n_heads": 2, "n_layers": 1, "dropout": 0.5},
    "training": {"learning_rate": 1e-3},
}
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Bare:
    """A loader of somebody else's: batches, and nothing known about them."""

    def __init__(self, loader: BatchLoader) -> None:
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def fitted(package, processed: Path, folder: Path, *, bare: bool = False, **options):
    """Train as the contract shows, and save a plain checkpoint."""
    loaders = create_dataloaders(processed, batch_size=64, num_workers=0)
    train_loader, val_loader, test_loader = map(Bare, loaders) if bare else loaders
    module = AlphaSTomicsModule(CFG, 24)
    trainer = package.Trainer(max_epochs=1, default_root_dir=folder, **QUIET, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Lightning's advice on workers and logging
        trainer.fit(module, train_loader, val_loader)
        (tested,) = trainer.test(module, test_loader, verbose=False)
    trainer.save_checkpoint(folder / "plain.ckpt")
    return module, tested, loaders


@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_either_lightning_trains_in_micrometres_and_every_command_reads_its_checkpoint(
    package, processed: Path, tmp_path: Path
):
    module, tested, loaders = fitted(package, processed, tmp_path)
    statistics = loaders[0].metadata.position_statistics
    assert statistics is not None
    # Slices without a common frame are never mixed in a set.
    assert float(module.position_scale) == statistics.within_slice_scale
    # In raw micrometres the loss of distances is some 1e6.
    assert 0 < tested["test/position"] < 100
    config = tiny_config(processed, tmp_path)
    made = commands.sample(
        config, checkpoint=tmp_path / "plain.ckpt", input_data=processed, output=None,
        split="test", overwrite=True,
    )  # fmt: skip
    assert made["cells"] > 0
    scores = commands.test(
        config, checkpoint=tmp_path / "plain.ckpt", input_data=processed, split="test", output=None
    )
    assert "expr_to_pos" in scores


def test_a_foreign_loader_teaches_the_scale_by_its_first_training_batch(
    processed: Path, tmp_path: Path
):
    module, _, _ = fitted(lightning.pytorch, processed, tmp_path, bare=True)
    again, _, _ = create_dataloaders(processed, batch_size=64, num_workers=0)
    batch = next(iter(again))
    places = [
        positions[real] - positions[real].mean(0)
        for positions, real in zip(
            batch.positions.double().numpy(), batch.node_mask.numpy(), strict=True
        )
    ]
    squares = (np.concatenate(places) ** 2).mean(0)
    expected = np.sqrt(squares.sum() / (squares > 0).sum())
    assert float(module.position_scale) == pytest.approx(expected, rel=1e-6)
    loaded, genes = load_module(tmp_path / "plain.ckpt")
    assert genes[0] == "gene_0"
    assert float(loaded.position_scale) == float(module.position_scale)


def test_a_run_without_validation_cells_works_with_either_lightning(
    processed: Path, tmp_path: Path
):
    train_loader, _, _ = create_dataloaders(processed, batch_size=64, num_workers=0)
    for package in (lightning.pytorch, pytorch_lightning):
        trainer = package.Trainer(max_steps=1, default_root_dir=tmp_path, **QUIET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            trainer.fit(AlphaSTomicsModule(CFG, 24), train_loader)
        assert trainer.global_step == 1


def test_load_from_checkpoint_gives_the_module_back(processed: Path, tmp_path: Path):
    module, _, _ = fitted(lightning.pytorch, processed, tmp_path)
    loaded = AlphaSTomicsModule.load_from_checkpoint(tmp_path / "plain.ckpt")
    assert isinstance(loaded, AlphaSTomicsModule)
    assert loaded.genes == module.genes
    assert loaded.normalization == module.normalization
    for name, value in module.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    masked = MaskedDiffusionModule.load_from_checkpoint(tmp_path / "plain.ckpt")
    assert isinstance(masked, MaskedDiffusionModule)


@pytest.mark.parametrize("part", ["module", "model", "average"])
def test_a_sampler_of_a_trained_model_returns_the_users_units(part: str):
    module = AlphaSTomicsModule(CFG, 5)
    cells = tissue()
    module.eval().score(cells, module.draw(cells, "test"))
    assert float(module.position_scale) == pytest.approx(500, rel=0.1)
    model = module if part == "module" else getattr(module, part)
    _, predicted = DiffusionSampler(model, module.noise_model).sample(
        cells.expression, cells.positions, cells.node_mask, mode="expr_to_pos", num_steps=2
    )
    inside, explicit = (
        DiffusionSampler(model, module.noise_model, position_scale=scale).sample(
            cells.expression, cells.positions, cells.node_mask, mode="expr_to_pos", num_steps=2,
            generator=torch.Generator().manual_seed(1),
        )[1]
        for scale in (1.0, float(module.position_scale))
    )  # fmt: skip
    ratio = float(explicit.std() / inside.std())
    assert ratio == pytest.approx(float(module.position_scale), rel=1e-4)
    assert 0.3 < float(predicted.std() / explicit.std()) < 3


def test_sampling_switches_dropout_off_and_on_again():
    module = AlphaSTomicsModule(CFG, 5, position_scale=500.0).train()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # as if trained: at its start a layer adds nothing that could drop out
        for parameter in module.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    cells = tissue()
    sampler = DiffusionSampler(module.model, module.noise_model)
    made = [
        sampler.sample(
            cells.expression, cells.positions, cells.node_mask, mode="pos_to_expr", num_steps=2,
            generator=torch.Generator().manual_seed(1),
        )[0]
        for _ in range(2)
    ]  # fmt: skip
    assert torch.equal(*made)
    assert module.model.training


def test_forward_speaks_the_users_units():
    module = AlphaSTomicsModule(CFG, 5, position_scale=500.0).eval()
    cells = tissue()
    time = torch.full((len(cells.expression), 2), 0.1)
    found = module(cells.expression, cells.positions, time, cells.node_mask)
    inner = module.average(
        cells.expression, module.inner_positions(cells, None), time, cells.node_mask
    )
    torch.testing.assert_close(found.position, inner.position * 500.0)
    torch.testing.assert_close(found.expression, inner.expression)


def test_the_contracts_snippet_runs_as_written(processed: Path):
    train_loader, _, _ = create_dataloaders(
        data_dir=str(processed), batch_size=64, streaming=True, buffer_size=50000
    )
    cfg, num_genes = CFG, train_loader.metadata.num_genes
    module = AlphaSTomicsModule(cfg, num_genes)
    batch = next(iter(train_loader))
    expr, pos, mask = batch.expression, batch.positions, batch.node_mask
    module.score(batch, module.draw(batch, "test"))
    sampler = DiffusionSampler(module.average, module.noise_model)
    expression, positions = sampler.sample(expr, pos, mask, mode="joint", num_steps=3)
    assert (expression.shape, positions.shape) == (expr.shape, pos.shape)
    loss = DualModalLoss(
        lambda_expression=1.0, lambda_position=1.0, lambda_masked_reconstruction=0.5
    )
    assert loss is not None
    network = GatedSelfAttentionModel(num_genes, d_model=16, n_heads=2, n_layers=1)
    times = torch.full((len(expr), 1), 0.5)
    expr_out, pos_out, time_out = network(expr, times, pos / 500)
    assert (expr_out.shape, pos_out.shape, time_out.shape) == (expr.shape, pos.shape, times.shape)


def tissue(num_cells: int = 40) -> DataHolder:
    generator = torch.Generator().manual_seed(0)
    return DataHolder.of(
        torch.randn(2, num_cells, 5, generator=generator),
        500 * torch.randn(2, num_cells, 3, generator=generator) + 3000,
        torch.ones(2, num_cells, dtype=torch.bool),
    )
