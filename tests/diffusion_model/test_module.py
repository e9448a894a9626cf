"""The module: units, averages, learning rate, and gradients that are not finite."""

import copy
from dataclasses import replace

import pytest
import torch

from alphastomics.config import Config
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model import AlphaSTomicsModule, MaskedDiffusionModule
from alphastomics.diffusion_model.ema import average_decay, update_average
from alphastomics.diffusion_model.randomness import rotation_of, stream_seed
from alphastomics.diffusion_model.updating_module import learning_rate_factor
from alphastomics.errors import InputError
from alphastomics.utils.dataholder import DataHolder
from tests.diffusion_model.conftest import logged, weights

TINY = {"model": {"d_model": 16, "n_heads": 2, "n_layers": 2}}


def config(**sections) -> Config:
    return parse_document({**TINY, **sections}, "test")


def batch(num_sets=2, num_cells=9, num_genes=5, seed=0) -> DataHolder:
    gen = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_sets, num_cells, generator=gen) < 0.8
    return DataHolder.of(
        torch.randn(num_sets, num_cells, num_genes, generator=gen),
        100 * torch.randn(num_sets, num_cells, 3, generator=gen) + 1000,
        mask,
    )


def trained(module: AlphaSTomicsModule) -> AlphaSTomicsModule:
    """Move the weights off their start, at which time and position say nothing."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3, 1e6])
def test_units_of_the_coordinates_change_nothing_inside(factor: float):
    torch.manual_seed(0)
    module = trained(AlphaSTomicsModule(config(), 5, position_scale=100.0)).eval()
    other = copy.deepcopy(module)
    other.position_scale *= factor
    cells = batch()
    scaled = DataHolder.of(cells.expression, cells.positions * factor, cells.node_mask)
    randomness = module.draw(cells, "test")
    one, two = module.score(cells, randomness), other.score(scaled, randomness)
    torch.testing.assert_close(one.terms, two.terms, rtol=1e-3, atol=1e-5)


def test_positions_inside_are_centred_and_of_unit_scale():
    cells = batch(1, 500)
    module = AlphaSTomicsModule(config(), 5, position_scale=100.0)
    inner = module.inner_positions(cells, None)[cells.node_mask]
    assert float(inner.mean(0).abs().max()) < 1e-5
    assert float(inner.std()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("mode", "given"), [("expr_to_pos", "expression"), ("pos_to_expr", "position")]
)
def test_a_given_modality_reaches_the_network_as_it_is_and_is_not_scored(mode, given):
    module = AlphaSTomicsModule(config(training={"mode": mode}), 5)
    cells = batch()
    scored = module.score(cells, module.draw(cells, "test"))
    assert float(getattr(scored.terms, given).detach()) == 0
    other = "position" if given == "expression" else "expression"
    assert float(getattr(scored.terms, other).detach()) > 0


def test_the_randomness_of_a_set_depends_on_nothing_but_its_seed():
    module = AlphaSTomicsModule(
        config(masking={"enable": True}, diffusion={"position_frame": "random"}), 5
    )
    cells = batch(3)
    cells = replace(cells, node_mask=torch.ones_like(cells.node_mask))
    seeds = torch.tensor([stream_seed(1, key) for key in "abc"])
    order, num_cells = [2, 0], cells.node_mask.shape[1] - 3
    # Other sets beside it, in another order, and less padding.
    fewer = cells.mapped(lambda values: values[order, :num_cells] if len(values) == 3 else values)
    whole, part = module.randomness(cells, seeds), module.randomness(fewer, seeds[order])
    for one, other in ((whole.times, part.times), (whole.rotation, part.rotation)):
        torch.testing.assert_close(one[order], other)
    pairs = [
        *zip(whole.hidden, part.hidden, strict=True),
        (whole.noise(cells).expression, part.noise(fewer).expression),
    ]
    for one, other in pairs:
        torch.testing.assert_close(one[order, :num_cells], other)


def test_noise_of_positions_has_no_mean_and_padding_none():
    module, cells = AlphaSTomicsModule(config(), 5), batch(4, 30)
    cells.node_mask[1, 20:] = False
    noise = module.draw(cells, "test").noise(cells)
    assert float(noise.position.sum(1).abs().max()) < 1e-4
    for values in noise[:2]:
        assert not values[~cells.node_mask].any()
        assert float(values[cells.node_mask].std()) == pytest.approx(1.0, abs=0.15)


def test_randomness_follows_from_seed_and_purpose_and_leaves_the_global_state_alone():
    module, cells = AlphaSTomicsModule(config(masking={"enable": True}), 5), batch()
    before = torch.random.get_rng_state()
    one, same, other = (module.draw(cells, "train", epoch) for epoch in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    for part in range(2):
        noise = [each.noise(cells)[part] for each in (one, same, other)]
        assert torch.equal(noise[0], noise[1])
        assert not torch.isclose(noise[0], noise[2])[cells.node_mask].any()
    assert torch.equal(one.times, same.times)
    assert torch.equal(one.hidden.expression, same.hidden.expression)


def test_all_but_the_seeds_is_drawn_without_the_host():
    """A tensor without values stands for one that the host would have to wait for."""
    settings = config(masking={"enable": True, "progressive_masking": True},
                      diffusion={"position_frame": "random"})  # fmt: skip
    module, cells = AlphaSTomicsModule(settings, 5).to("meta"), batch().to("meta")
    randomness = module.randomness(cells, torch.zeros(len(cells.node_mask)).long().to("meta"))
    drawn = (*randomness[:3], *randomness.hidden, *randomness.noise(cells, 4))
    assert {values.device.type for values in drawn} == {"meta"}


def test_turns_are_uniform_and_mirrored_where_allowed():
    gen = torch.Generator().manual_seed(0)
    quaternion = torch.randn(2000, 4, generator=gen, dtype=torch.float64)
    turns = rotation_of(quaternion, torch.rand(2000, generator=gen) < 0.5)
    torch.testing.assert_close(turns @ turns.mT, torch.eye(3).double().expand_as(turns))
    assert float((torch.linalg.det(turns) < 0).double().mean()) == pytest.approx(0.5, abs=0.05)
    # A uniform rotation sends any direction to a uniform one: mean 0, variance 1/3.
    assert float(turns.mean(0).abs().max()) < 0.05
    assert float((turns.var(0) - 1 / 3).abs().max()) < 0.03
    proper = rotation_of(quaternion, torch.zeros(2000, dtype=torch.bool))
    assert (torch.linalg.det(proper) > 0).all()


def test_given_positions_keep_their_frame_and_noised_ones_are_turned():
    cells, turned = batch(40), {"diffusion": {"position_frame": "random"}}
    given = AlphaSTomicsModule(config(training={"mode": "pos_to_expr"}, **turned), 5).draw(
        cells, "test"
    )
    assert torch.equal(given.rotation, torch.eye(3, dtype=torch.float64).expand(40, 3, 3))
    noised = AlphaSTomicsModule(config(training={"mode": "expr_to_pos"}, **turned), 5).draw(
        cells, "test"
    )
    assert float((noised.rotation - torch.eye(3)).abs().amax((1, 2)).min()) > 0.01


def test_masked_diffusion_is_the_module_with_masking_on():
    module = MaskedDiffusionModule(config(), 5)
    assert module.config.masking.enable
    cells = batch()
    randomness = module.draw(cells, "test")
    assert randomness.hidden.expression is not None
    assert float(module.score(cells, randomness).terms.masked.detach()) > 0


def test_what_hidden_entries_hold_is_not_seen():
    torch.manual_seed(0)
    module = trained(MaskedDiffusionModule(config(), 5)).eval()
    cells = batch()
    randomness = module.draw(cells, "test")
    hidden = randomness.hidden.expression
    one = module.score(cells, randomness).prediction
    changed = replace(
        cells, expression=torch.where(hidden, cells.expression + 7.0, cells.expression)
    )
    other = module.score(changed, randomness).prediction
    torch.testing.assert_close(one.position, other.position)


def test_the_average_follows_by_hand():
    one, other = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(one.weight, 1.0)
    torch.nn.init.constant_(other.weight, 3.0)
    update_average(one, other, 0.9)
    assert float(one.weight.detach()) == pytest.approx(1.2)
    assert [average_decay(0.999, n) for n in (0, 10, 10**6)] == [0.1, 11 / 20, 0.999]


def test_the_learning_rate_rises_then_falls_to_its_share():
    factors = [learning_rate_factor(step, 100, 10, 0.05) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == pytest.approx(1.0)
    assert factors[55] == pytest.approx(0.05 + 0.95 / 2)
    assert learning_rate_factor(100, 100, 10, 0.05) == pytest.approx(0.05)
    assert factors[10:] == sorted(factors[10:], reverse=True)


def poison(monkeypatch, step: int) -> None:
    original = AlphaSTomicsModule.training_step

    def training_step(self, batch, batch_idx):
        loss = original(self, batch, batch_idx)
        return loss * torch.nan if self.trainer.global_step == step else loss

    monkeypatch.setattr(AlphaSTomicsModule, "training_step", training_step)


def test_a_gradient_that_is_not_finite_stops_before_the_update(run, monkeypatch, tmp_path):
    poison(monkeypatch, 2)
    with pytest.raises(InputError, match="not finite at step 2, epoch 0, in a batch of slices sl"):
        run("poisoned")
    kept = torch.load(tmp_path / "poisoned/checkpoints/last.ckpt", weights_only=True)
    assert kept["global_step"] == 2
    assert all(torch.isfinite(value).all() for value in kept["state_dict"].values())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted_on_request(run, monkeypatch):
    poison(monkeypatch, 2)
    folder = run("skipping", training={"on_nonfinite": "skip"})
    assert all(torch.isfinite(value).all() for value in weights(folder).values())
    assert ("3", "0", "train/skipped_steps", "1.0") in logged(folder)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_scale_is_refused(scale: float):
    with pytest.raises(InputError, match="position_scale"):
        AlphaSTomicsModule(config(), 5, position_scale=scale)


def test_a_noised_batch_says_its_diffusion_time():
    module = AlphaSTomicsModule(config(), 5)
    cells = batch()
    assert cells.diffusion_time is None
    randomness = module.draw(cells, "test")
    time = module.score(cells, randomness).batch.diffusion_time
    assert time is not None
    expected = randomness.times / module.noise_model.num_timesteps
    torch.testing.assert_close(time, expected, rtol=1e-6,
                               atol=0, check_dtype=False)  # fmt: skip
