"""Masking: the ratios asked for, the structure asked for, nothing else."""

import pytest
import torch

from alphastomics.config import DiffusionConfig, MaskingConfig
from alphastomics.diffusion_model.masking import draw_masks, grown_ratio
from alphastomics.diffusion_model.noise import NoiseModel
from alphastomics.diffusion_model.randomness import StepRandomness, draw_for_sets

BOTH = torch.ones(40, 2, dtype=torch.bool)


def settings(**changes) -> MaskingConfig:
    return MaskingConfig(enable=True, **changes)


def hidden(config: MaskingConfig, noised=BOTH, step=0, seed=0, genes=37):
    seeds = 1000 * seed + torch.arange(len(noised))
    return draw_masks(config, seeds, noised, (50, genes), torch.tensor(step))


def drawn(config: MaskingConfig, num_sets: int) -> StepRandomness:
    noise, seeds = NoiseModel(DiffusionConfig()), torch.arange(num_sets)
    return draw_for_sets(noise, "joint", config, (50, 37), torch.tensor(0), seeds, reflection=True)


@pytest.mark.parametrize("strategy", ["random", "block", "structured"])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.33, 0.5, 1.0])
def test_the_share_of_hidden_entries_is_the_ratio(strategy: str, ratio: float):
    config = settings(
        mask_strategy=strategy, expression_mask_ratio=ratio, position_mask_ratio=ratio
    )
    masks = [hidden(config, seed=seed) for seed in range(10)]
    for part in ("expression", "position"):
        share = torch.stack([getattr(mask, part).double().mean() for mask in masks]).mean()
        assert float(share) == pytest.approx(ratio, abs=0.02)


def test_random_hides_entries_independently():
    mask = hidden(settings(), genes=2).expression.double().flatten(0, 1)
    assert abs(float(torch.corrcoef(mask.T)[0, 1])) < 0.08


def test_block_hides_one_run_of_each_cell_round_the_end():
    mask = hidden(settings(mask_strategy="block")).expression
    edges = (mask != mask.roll(1, dims=-1)).sum(-1)
    assert (edges == 2).all()
    lengths = mask.sum(-1)
    assert lengths.min() >= 11
    assert lengths.max() <= 12
    # Every gene is hidden as often as every other.
    share = mask.double().mean((0, 1))
    assert float(share.max() - share.min()) < 0.1


def test_structured_hides_genes_of_a_set_and_positions_of_a_cell():
    mask = hidden(settings(mask_strategy="structured"))
    assert (mask.expression == mask.expression[:, :1]).all()
    assert (mask.position == mask.position[..., :1]).all()
    assert len({tuple(row.tolist()) for row in mask.expression[:, 0]}) > 30


def test_a_given_modality_is_never_hidden():
    noised = torch.tensor([[True, False], [False, True]])
    mask = hidden(settings(expression_mask_ratio=1.0, position_mask_ratio=1.0), noised)
    assert mask.expression.all((1, 2)).tolist() == [True, False]
    assert mask.position.all((1, 2)).tolist() == [False, True]
    assert not mask.expression[1].any()


def test_masking_probability_is_the_share_of_sets_that_are_masked():
    sets = drawn(settings(masking_probability=0.3), 2000)
    may_hide = sets.times > 0
    parts = (mask.any((1, 2)) for mask in sets.hidden)
    masked = torch.stack(list(parts), dim=1)
    assert not masked[~may_hide].any()
    assert float(masked[may_hide].double().mean()) == pytest.approx(0.3, abs=0.03)
    # Expression and position of a set are masked together, or neither is.
    both = may_hide.all(1)
    assert torch.equal(masked[both, 0], masked[both, 1])


def test_nothing_is_masked_unless_asked_for():
    assert drawn(MaskingConfig(enable=False), 5).hidden == (None, None)


@pytest.mark.parametrize("strategy", ["random", "block", "structured"])
def test_masks_do_not_change_with_padding_and_other_sets(strategy: str):
    config, seeds = settings(mask_strategy=strategy), torch.tensor([4, 9, 2])
    whole = draw_masks(config, seeds, BOTH[:3], (50, 37), torch.tensor(0))
    part = draw_masks(config, seeds[[2, 0]], BOTH[:2], (20, 37), torch.tensor(0))
    assert torch.equal(whole.expression[[2, 0], :20], part.expression)
    assert torch.equal(whole.position[[2, 0], :20], part.position)


def test_progressive_masking_grows_from_nothing_to_the_ratio():
    config = settings(progressive_masking=True, progressive_steps=100)
    grown = [float(grown_ratio(0.3, config, torch.tensor(step))) for step in (0, 50, 100, 500)]
    assert grown == pytest.approx([0, 0.15, 0.3, 0.3])
    assert not hidden(config, step=0).expression.any()
