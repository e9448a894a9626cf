"""The processed tissue of the diffusion model's tests."""

from tests.diffusion_model.conftest import processed

__all__ = ["processed"]
