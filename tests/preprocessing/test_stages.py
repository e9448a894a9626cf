"""Several datasets through both stages: one frame, one list of cell types, every cell once."""

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array, csr_matrix

from alphastomics.config import PreprocessingConfig
from alphastomics.preprocessing.batch_loader import create_dataloaders
from alphastomics.preprocessing.commands import stage1, stage2
from alphastomics.preprocessing.normalize import log_normalized
from tests.preprocessing.tissue import cells_of, digests, make_slice, metadata_of, run, write

TYPES = ["neuron", "glia"]


def two_datasets(folder: Path, listed: str = "g1\ng2\ng3\n", **flags) -> list[Path]:
    """Run stage 1 on two datasets."""
    genes = folder / "genes.txt"
    genes.write_text(listed)
    outputs = []
    for number in range(2):
        source = write(
            folder / f"in{number}",
            s1=make_slice(20, ["g1", "g2", "g3"], number, types=TYPES[number : number + 1]),
            s2=make_slice(25, ["g1", "g2", "g3"], 5 + number, types=["z"]),
        )
        stage1(
            PreprocessingConfig(cell_type_key="cell_type", **flags),
            input_dir=source,
            output_dir=folder / f"stage1-{number}",
            gene_list_file=genes,
            overwrite=False,
            scheduler=None,
        )
        outputs.append(folder / f"stage1-{number}")
    return outputs


def merge(inputs: list[Path], output: Path, **options):
    return stage2(
        PreprocessingConfig(**options),
        input_dirs=inputs,
        output_dir=output,
        seed=1,
        overwrite=False,
        scheduler=None,
    )


def test_merged_datasets_go_on_counting_in_z_and_share_their_cell_types(tmp_path):
    inputs = two_datasets(tmp_path, z_spacing=0.1)
    merge(inputs, tmp_path / "out")
    metadata, cells = metadata_of(tmp_path / "out"), cells_of(tmp_path / "out")
    assert metadata["cell_types"] == ["glia", "neuron", "z"]
    assert [record["z"] for record in metadata["slices"]] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert [record["dataset"] for record in metadata["slices"]] == [0, 0, 1, 1]
    z_values = np.stack(cells["position"].to_numpy())[:, 2]
    expected = np.array([record["z"] for record in metadata["slices"]])
    assert (z_values == expected[cells["slice_id"]]).all()
    assert len(cells) == 90
    assert len({record["name"] for record in metadata["slices"]}) == 4
    labels = [metadata["cell_types"][number] for number in cells["cell_type"]]
    assert labels[:20] == ["neuron"] * 20
    assert labels[45:65] == ["glia"] * 20


def test_preprocess_equals_stage1_and_stage2(tmp_path):
    inputs = two_datasets(tmp_path)
    merge(inputs[:1], tmp_path / "staged")
    run(
        tmp_path / "in0",
        tmp_path / "at-once",
        seed=1,
        genes=tmp_path / "genes.txt",
        cell_type_key="cell_type",
    )
    assert digests(tmp_path / "staged") == digests(tmp_path / "at-once")


def test_a_dataset_that_came_log_normalised_is_merged_as_it_is(tmp_path, caplog):
    genes = tmp_path / "genes.txt"
    genes.write_text("g1\ng2\ng3\n")
    counts = make_slice(30, ["g1", "g2", "g3"], 1)
    prepared = counts.copy()
    prepared.X = csr_matrix(log_normalized(csr_array(counts.X)))
    inputs = []
    for name, data, flags in (
        ("counts", counts, {}),
        ("prepared", prepared, {"log_normalize": False}),
    ):
        stage1(
            PreprocessingConfig(**flags),
            input_dir=write(tmp_path / f"in-{name}", s=data),
            output_dir=tmp_path / name,
            gene_list_file=genes,
            overwrite=False,
            scheduler=None,
        )
        inputs.append(tmp_path / name)
    for order in (inputs, inputs[::-1]):
        output = tmp_path / f"out-{order[0].name}"
        merge(order, output)
        metadata, cells = metadata_of(output), cells_of(output)
        assert metadata["normalization"]["log_normalize"]
        result = {
            r["name"].split(":")[1].removeprefix("in-"): r["log_normalize"]
            for r in metadata["slices"]
        }
        assert result == {"counts": True, "prepared": False}
        values = np.stack(cells["expression"].to_numpy())
        np.testing.assert_allclose(values[:30], values[30:], atol=1e-5)
    assert "--skip-log-normalize" in caplog.text


@pytest.mark.parametrize("storage", ["dense", "sparse"])
def test_a_dataset_that_came_standardised_is_not_standardised_again(tmp_path, storage):
    scaled, plain = two_datasets(tmp_path, scale=True), tmp_path / "plain"
    stage1(
        PreprocessingConfig(scale=False),
        input_dir=tmp_path / "in1",
        output_dir=plain,
        gene_list_file=tmp_path / "genes.txt",
        overwrite=False,
        scheduler=None,
    )
    merge([scaled[0], plain], tmp_path / "mixed", storage=storage)
    merge([scaled[0]], tmp_path / "first")
    merge([plain], tmp_path / "second")
    loaders = [
        create_dataloaders(tmp_path / name, batch_size=90, num_workers=0)
        for name in ("mixed", "first", "second")
    ]
    mixed, first, second = (values_by_cell(parts) for parts in loaders)
    np.testing.assert_allclose(mixed, np.concatenate([first, second]), atol=1e-6)


def values_by_cell(loaders) -> np.ndarray:
    """The expression of all cells, in the order of the input."""
    result = {
        int(cell): values
        for loader in loaders
        for batch in loader
        for cell, values, real in zip(
            batch.cell_id[0], batch.expression[0].numpy(), batch.node_mask[0], strict=True
        )
        if real
    }
    return np.stack([result[cell] for cell in sorted(result)])
