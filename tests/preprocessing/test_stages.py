"""Several datasets through both stages: one frame, one list of cell types, every cell once."""

from pathlib import Path

import numpy as np
import pytest

from alphastomics.config import PreprocessingConfig
from alphastomics.preprocessing.commands import stage1, stage2
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
    heights = np.stack(cells["position"].to_numpy())[:, 2]
    expected = np.array([record["z"] for record in metadata["slices"]])
    assert (heights == expected[cells["slice_id"]]).all()
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
