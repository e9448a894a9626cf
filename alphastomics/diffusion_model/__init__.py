"""Diffusion over cells: noise, masking, losses, training and sampling."""

from alphastomics.diffusion_model.loss import DualModalLoss
from alphastomics.diffusion_model.module import AlphaSTomicsModule, MaskedDiffusionModule
from alphastomics.diffusion_model.sample import DiffusionSampler

__all__ = ["AlphaSTomicsModule", "DiffusionSampler", "DualModalLoss", "MaskedDiffusionModule"]
