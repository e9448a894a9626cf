"""The count model by itself: likelihoods, latents, and what is drawn of them."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from alphastomics.attn_model.count_model import (
    CountModel,
    Decoded,
    draw_counts,
    negative_binomial_loss,
    value_loss,
)


def small_model(num_genes: int = 12) -> CountModel:
    torch.manual_seed(0)
    model = CountModel(num_genes, 4)
    model.depth[:] = torch.tensor([math.log(200), 0.3])
    return model


def test_negative_binomial_equals_scipy_but_for_a_constant_of_the_counts():
    counts = torch.tensor([[0.0, 1.0, 5.0, 40.0]], dtype=torch.float64)
    rate = torch.tensor([[0.3, 2.0, 4.0, 30.0]], dtype=torch.float64)
    dispersion = torch.tensor([0.5, 1.0, 3.0, 10.0], dtype=torch.float64)
    loss = negative_binomial_loss(counts, rate, dispersion.log())
    chance = (dispersion / (dispersion + rate)).numpy()
    expected = -stats.nbinom.logpmf(counts.numpy(), dispersion.numpy(), chance)
    expected -= torch.lgamma(counts + 1).numpy()
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-9)


def test_values_are_zero_by_chance_and_else_gaussian():
    zero, log_std = torch.tensor([[True, False]]), torch.tensor([0.0, math.log(2.0)])
    decoded = Decoded(torch.tensor([[9.0, 1.0]]), torch.tensor([[0.0, 0.0]]), torch.zeros(1, 2))
    loss = value_loss(decoded, torch.tensor([[5.0, 3.0]]), zero, log_std)
    gaussian = 0.5 * ((3 - 1) / 2) ** 2 + math.log(2)
    torch.testing.assert_close(loss, torch.tensor([[math.log(2), math.log(2) + gaussian]]))


def test_what_is_drawn_is_the_normalised_form_of_counts_and_follows_the_seed():
    model = small_model()
    latents = torch.randn(300, 4)
    drawn, again, other = (model.draw(latents, 0, seed) for seed in (1, 1, 2))
    assert drawn.counts is not None
    assert again.counts is not None
    assert drawn.counts.min() >= 0
    np.testing.assert_array_equal(drawn.counts, again.counts)
    assert (drawn.expression != other.expression).any()
    total = np.maximum(drawn.counts.sum(1, keepdims=True), 1)
    np.testing.assert_allclose(drawn.expression, np.log1p(drawn.counts * 1e4 / total), rtol=1e-5)


def test_the_style_of_a_slice_shifts_genes_and_totals():
    model = small_model()
    model.depth[1] = torch.tensor([math.log(2000), 0.3])
    model.offset[1, 0] = 3.0
    counts = [model.draw(torch.zeros(500, 4), style, 0).counts for style in (0, 1)]
    plain, styled = (part.astype(float) for part in counts if part is not None)
    assert 8 < styled.sum() / plain.sum() < 12
    shares = [part[:, 0].sum() / part.sum() for part in (plain, styled)]
    assert shares[1] > 3 * shares[0]


def test_values_that_are_no_counts_are_at_least_zero_and_have_none():
    model = small_model()
    model.is_counts.fill_(False)
    model.mean[:], model.std[:] = 2.0, 0.5
    drawn = model.draw(torch.randn(100, 4), 0, 0)
    assert drawn.counts is None
    assert drawn.expression.min() == -4.0


def test_genes_that_were_not_measured_do_not_change_a_latent():
    model = small_model()
    expression, mask = torch.randn(5, 12), torch.arange(12).expand(5, 12) < 8
    changed = torch.where(mask, expression, 7.0)
    torch.testing.assert_close(model.latents(expression, mask), model.latents(changed, mask))


def test_denoising_by_itself_leaves_clean_latents_and_expects_nothing_of_noise():
    model = small_model()
    noisy = torch.randn(2, 3, 4)
    torch.testing.assert_close(model.denoise(noisy, torch.zeros(2)), noisy)
    torch.testing.assert_close(
        model.denoise(noisy, torch.ones(2)), torch.zeros(2, 3, 4), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(("rate", "dispersion"), [(0.05, 0.4), (1.5, 2.0), (8.0, 0.3), (60.0, 5.0)])
def test_counts_are_negative_binomial(rate, dispersion):
    number = 40_000
    random = np.random.default_rng(0)
    drawn = draw_counts(np.full((number, 2), rate), np.full(2, dispersion), random)
    chance = stats.nbinom(dispersion, dispersion / (dispersion + rate))
    assert np.isclose(drawn.mean(), chance.mean(), rtol=0.06)
    most = int(chance.ppf(0.995))
    expected = np.append(chance.pmf(np.arange(most)), chance.sf(most - 1))
    observed = np.bincount(np.minimum(drawn.ravel(), most), minlength=most + 1)
    together = expected * drawn.size >= 5
    statistic = (
        (observed - expected * drawn.size)[together] ** 2 / (expected * drawn.size)[together]
    ).sum()
    assert statistic < stats.chi2(together.sum()).ppf(0.9999)


def test_counts_of_any_rate_end():
    rate = np.array([[1e-12, 1e-3, 19.9, 20.0, 1e6]])
    for dispersion in (np.exp(-6), 1.0, np.exp(6)):
        drawn = draw_counts(rate.repeat(2000, 0), np.full(5, dispersion), np.random.default_rng(1))
        assert (drawn >= 0).all()
        assert drawn[:, 0].sum() == 0


def test_a_usual_depth_is_over_the_genes_that_a_slice_measured():
    model = small_model(12)
    # Two panels of 8 genes, which share 4; genes that a slice lacks have a share all the same.
    model.offset[:] = torch.randn(12)
    model.measured[0, 8:] = False
    model.measured[1:, :4] = False
    model.depth[:, 0] = math.log(200)
    panel = torch.arange(12) < 8
    shares = model.offset[0].double().exp()
    of_second = 200 * float(shares[:8].sum() / shares[4:].sum())
    expected = sorted((of_second, 200.0))
    assert model.usual_depths(panel) == pytest.approx(expected)
