"""Where cells lie in a tissue that the model knows: positions enter, the common frame leaves."""

import logging
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from alphastomics.attn_model.count_model import STYLES
from alphastomics.attn_model.niche_model import NicheModel
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.generation.cells import BARE_POSITIONS, InputCells

logger = logging.getLogger(__name__)

# Middle distance of cells from the middle of a tissue, whose coordinates have unit variance.
FARTHEST = 5.0


class TissueFrame(NamedTuple):
    """A tissue that the model knows, and where cells lie in it; None: anywhere."""

    tissue: int
    position: Float[Tensor, "N 3"] | None


def style_of(module: AlphaSTomicsModule, name: str, seed: int) -> int:
    """Return the style of a slice that the model knows, and of another a training slice's."""
    known = module.style_names
    if name in known:
        return known.index(name) % STYLES
    return seed % min(len(known), STYLES) if known else 0


def tissue_of_slice(
    module: AlphaSTomicsModule, niches: NicheModel, cells: InputCells, number: int
) -> int | None:
    """Return the tissue in whose frame the positions of a slice are; None where none is known."""
    known, name = module.style_names[:STYLES], cells.slice_names[number]
    if name in known:
        return known.index(name)
    if name == BARE_POSITIONS and len(module.style_names) == 1:
        return 0
    # The cells of a virtual section lie in the frame of all slices, though each was fitted in its.
    in_frame = bool(niches.is_common) or cells.common_frame
    if not in_frame or cells.position is None or not known:
        return None
    middle = positions_of(cells, number).mean(0)
    dims = cells.dims if not cells.common_frame else 3  # the height of a planar query is nobody's
    away = np.square(niches.middle[: len(known), :dims].cpu().numpy() - middle[:dims]).sum(1)
    return int(away.argmin())


def positions_of(cells: InputCells, number: int) -> Float[np.ndarray, "N 3"]:
    """Return the positions of a slice as the user gave them."""
    assert cells.position is not None
    position = cells.position[cells.rows_of(number)].astype(np.float64)
    return position if cells.origin is None else position + cells.origin


def frame_of_slice(
    module: AlphaSTomicsModule, niches: NicheModel, cells: InputCells, number: int
) -> TissueFrame | None:
    """Bring the positions of a slice into the common frame, if they are in a known one."""
    tissue = tissue_of_slice(module, niches, cells, number)
    if tissue is None:
        return None
    position = torch.from_numpy(positions_of(cells, number))
    if cells.dims == 2 and not (cells.common_frame and bool(niches.is_common)):
        position[:, 2] = niches.middle[tissue, 2]
    moved = position - niches.center[tissue].cpu()
    inner = moved @ niches.rotation[tissue].cpu().mT / float(module.position_scale)
    if float(inner.square().sum(1).median()) > FARTHEST**2:
        logger.warning(
            "slice %s: most of its positions lie outside the tissue that the model knows by this "
            "name: are they in the same coordinates? Its expression is sampled by the network, "
            "which knows positions within a slice alone",
            cells.slice_names[number],
        )
        return None
    return TissueFrame(tissue, inner.float())
