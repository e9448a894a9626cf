"""The batch that crosses rooms."""

import dataclasses

import pytest
import torch

from alphastomics.utils.dataholder import DataHolder


def holder() -> DataHolder:
    return DataHolder(
        expression=torch.randn(2, 3, 4),
        positions=torch.randn(2, 3, 3),
        node_mask=torch.tensor([[True, True, False], [True, True, True]]),
        cell_type=torch.zeros(2, 3, dtype=torch.int64),
        slice_id=torch.zeros(2, 3, dtype=torch.int64),
        cell_id=torch.arange(6).reshape(2, 3),
        panel=torch.tensor([[0, 1, 0], [1, 1, 0]]),
        measured_genes=torch.tensor([[True, True, False, True], [False, True, True, True]]),
    )


def test_gene_mask_says_for_every_real_cell_which_genes_were_measured():
    result = holder()
    for b in range(2):
        for n in range(3):
            expected = result.measured_genes[result.panel[b, n]] & result.node_mask[b, n]
            assert torch.equal(result.gene_mask[b, n], expected)


def test_to_changes_the_floating_tensors_dtype_and_keeps_masks_and_numbers():
    moved = holder().to(torch.float64)
    assert moved.expression.dtype == moved.positions.dtype == torch.float64
    assert moved.node_mask.dtype == moved.measured_genes.dtype == torch.bool
    assert moved.cell_id.dtype == moved.panel.dtype == torch.int64
    assert moved.diffusion_time is None
    assert torch.equal(holder().to("cpu").cell_id, moved.cell_id)


def test_a_noised_batch_carries_its_time_along():
    noised = dataclasses.replace(holder(), diffusion_time=torch.rand(2, 1))
    assert noised.to(torch.float16).diffusion_time.dtype == torch.float16


def test_bare_tensors_count_as_measured_and_unlabelled():
    mask = torch.tensor([[True, False]])
    bare = DataHolder.of(torch.ones(1, 2, 5), torch.ones(1, 2, 3), mask)
    assert bare.gene_mask.tolist() == [[[True] * 5, [False] * 5]]
    assert bare.cell_type.tolist() == bare.slice_id.tolist() == [[-1, -1]]
    assert bare.num_cells == 1


def test_a_batch_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        holder().expression = torch.zeros(2, 3, 4)  # type: ignore[misc]
