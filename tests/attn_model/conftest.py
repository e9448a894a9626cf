"""What the tests of the network share: drawn cells, and a way past the shape annotations."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

from tests.attn_model.models import GENES


@pytest.fixture
def as_in_production() -> Iterator[None]:
    """Switch the tests' shape annotations off: a user meets the package's own messages."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture
def ragged_mask() -> Tensor:
    """Three sets of seven: holes in the first, all of the second, none of the third."""
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[0, [0, 2, 3, 5]] = True
    mask[1] = True
    return mask


@pytest.fixture
def awaken():
    """Move every weight off its starting value, so that what starts at zero has an effect."""

    def move(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return module

    return move


@pytest.fixture
def batch(ragged_mask):
    """Draw expression, positions, two times and a ragged mask."""
    expression, position = torch.randn(3, 7, GENES).double(), torch.randn(3, 7, 3).double()
    return expression, position, torch.rand(3, 2).double(), ragged_mask
