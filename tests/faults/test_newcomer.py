"""What a newcomer gets wrong on the first day: the line says what to write instead."""

import shutil

import pytest

from tests.faults.conftest import Tiny
from tests.faults.door import done, refused


def model(tiny: Tiny) -> list[object]:
    return ["--checkpoint", tiny.checkpoint, "--config", tiny.config]


def test_a_wrong_column_of_types_gets_the_columns_that_are_there(tiny, door):
    slices = ["--input_dir", tiny.slices, "--output_dir", "out"]
    outcome = door("preprocess", *slices, "--cell_type_key", "celltype")
    refused(outcome, "obs['celltype'] is missing", "cell_type, slice_id")


def test_a_folder_of_checkpoints_gets_its_checkpoint_named(tiny, door):
    outcome = door("sample", "--checkpoint", tiny.run / "checkpoints", "--input_data", tiny.slice)
    refused(outcome, f"give {tiny.checkpoint}")


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("expr_to_pos", "expr_to_pos needs cells: give --input_data\n"),
        ("joint", "joint needs cells: give --input_data, or --num_cells to make new tissue\n"),
    ],
)
def test_sampling_for_nothing_says_what_the_mode_needs(mode, words, tiny, door):
    refused(door("sample", *model(tiny), "--sample_mode", mode, "--output", "x.h5ad"), words)


def test_cells_given_for_new_tissue_are_said_to_count_by_number_alone(tiny, door):
    given = ["--input_data", tiny.slice, "--output", "x.h5ad"]
    outcome = door("sample", *model(tiny), *given)
    done(outcome)
    assert "only the number of cells counts" in outcome.err
    assert "--sample_mode expr_to_pos" in outcome.err


def test_data_that_a_run_names_relative_to_another_folder_are_missed_by_name(tiny, door, work):
    shutil.copytree(tiny.processed, work / "processed")
    done(door("train", "--config", tiny.config, "--data_dir", "processed"))
    shutil.move(work / "processed", work / "moved")
    run = work / "outputs/alphastomics"
    refused(door("report", run), "processed: no such file or folder, seen from the working folder")


def test_generated_cells_among_the_slices_are_pointed_out(tiny, door, own_slices, work):
    slices = ["preprocess", "--input_dir", own_slices]
    outcome = door(*slices, "--output_dir", "before")
    assert "alphastomics sample" not in outcome.err
    # Without --output the result lies beside the input.
    done(door("sample", *model(tiny), "--input_data", own_slices / "slice_0.h5ad"))
    assert (own_slices / "slice_0_generated.h5ad").is_file()
    outcome = door(*slices, "--output_dir", "after")
    done(outcome)
    assert "1 file written by `alphastomics sample`" in outcome.err
    assert "slice_0_generated.h5ad" in outcome.err
