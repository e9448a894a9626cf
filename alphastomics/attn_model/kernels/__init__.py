"""Triton kernels for CUDA behind one call, `fused_mixture`; `moe.py` has the plain version."""

from alphastomics.attn_model.kernels.autograd import fused_mixture, fused_serves
from alphastomics.attn_model.kernels.passes import Experts

__all__ = ["Experts", "fused_mixture", "fused_serves"]
