"""Diffusion over cells: noise, masking, losses, training and sampling."""

from alphastomics.diffusion_model.loss import DualModalLoss
from alphastomics.diffusion_model.module import AlphaSTomicsModule, MaskedDiffusionModule

__all__ = ["AlphaSTomicsModule", "DualModalLoss", "MaskedDiffusionModule"]
