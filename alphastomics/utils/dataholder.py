"""The batch: the one type that crosses from loading to noising, the network and the loss.

Legend of all shapes in the package: B sets (tissues), N cells of a set, G genes, D width, H heads,
E experts, S slices, P panels (sets of measured genes), T diffusion times (1 shared, 2 by modality).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

NONE = -1  # cell type, slice and cell id where there is none


@dataclass(frozen=True, kw_only=True)
class DataHolder:
    """B sets of N cells; a set with fewer cells is padded, and `node_mask` is false there.

    Parameters
    ----------
    expression
        Values of the genes; 0 in padding and for genes that were not measured.
    positions
        Coordinates in the user's own units; 0 in padding.
    node_mask
        True for real cells.
    cell_type
        Number of the cell type; -1 where there is none.
    slice_id
        Number of the slice; -1 in padding.
    cell_id
        Number of the cell in the whole dataset, the same in every run; -1 in padding.
    panel
        Row of `measured_genes` that holds for the cell.
    measured_genes
        For each panel of this batch, which genes were measured.
    smoothed
        Expression averaged over nearest neighbours of the whole slice, where it was worked out.
    expected
        Positions that follow from the expression alone, centred, where they were worked out.
    diffusion_time
        Once noised: the time of the set, or one for each modality.
    first_cells, real_cells
        The number of each set's first cell, and how many cells are real, where the host knows them:
        whoever has the tensors alone must wait for a GPU to say so.
    """

    expression: Float[Tensor, "B N G"]
    positions: Float[Tensor, "B N 3"]
    node_mask: Bool[Tensor, "B N"]
    cell_type: Int64[Tensor, "B N"]
    slice_id: Int64[Tensor, "B N"]
    cell_id: Int64[Tensor, "B N"]
    panel: Int64[Tensor, "B N"]
    measured_genes: Bool[Tensor, "P G"]
    smoothed: Float[Tensor, "B N F"] | None = None
    expected: Float[Tensor, "B N 3"] | None = None
    diffusion_time: Float[Tensor, "B T"] | None = None
    first_cells: tuple[int, ...] | None = None
    real_cells: int | None = None

    @classmethod
    def of(
        cls,
        expression: Float[Tensor, "B N G"],
        positions: Float[Tensor, "B N 3"],
        node_mask: Bool[Tensor, "B N"],
    ) -> "DataHolder":
        """Wrap bare tensors: no labels, and every gene counts as measured."""
        none = torch.full_like(node_mask, NONE, dtype=torch.int64)
        genes = expression.shape[-1]
        return cls(
            expression=expression,
            positions=positions,
            node_mask=node_mask,
            cell_type=none,
            slice_id=none,
            cell_id=none,
            panel=torch.zeros_like(none),
            measured_genes=torch.ones(1, genes, dtype=torch.bool, device=expression.device),
        )

    @property
    def gene_mask(self) -> Bool[Tensor, "B N G"]:
        """Tell which entries of `expression` were measured in a real cell."""
        # Expanded on demand: it is as large as the expression, and most panels are one row.
        return self.measured_genes[self.panel] & self.node_mask[..., None]

    @property
    def num_cells(self) -> Int64[Tensor, ""]:
        """Count the real cells."""
        return self.node_mask.sum()

    @property
    def padding_mask(self) -> Bool[Tensor, "B N"] | None:
        """Return `node_mask`, or None where the host knows that every cell is real."""
        return None if self.real_cells == self.node_mask.numel() else self.node_mask

    def count_cells(self) -> int:
        """Count the real cells; only a batch that was not counted makes the host wait."""
        return int(self.num_cells) if self.real_cells is None else self.real_cells

    def to(self, *args: object, **kwargs: object) -> "DataHolder":
        """Move all tensors, as `Tensor.to` does; a floating dtype reaches floating tensors only."""
        return self.mapped(lambda tensor: _moved(tensor, *args, **kwargs))

    def pin_memory(self) -> "DataHolder":
        """Copy all tensors to page-locked memory, from which a GPU reads without waiting."""
        return self.mapped(lambda tensor: tensor.pin_memory())

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "DataHolder":
        """Change every tensor."""
        changed: dict[str, Any] = {
            field.name: change(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **changed)


def _moved(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Apply `Tensor.to`, but keep masks and numbers what they are."""
    moved: Tensor = tensor.to(*args, **kwargs)  # type: ignore[call-overload]
    return moved if tensor.is_floating_point() else moved.to(tensor.dtype)
