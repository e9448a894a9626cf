"""What the last training takes from the one before it is compared with its checksum."""

import json
from pathlib import Path

import pytest

from alphastomics.diffusion_model.run_folder import read_record
from alphastomics.errors import InputError
from alphastomics.fit import chosen_epochs
from alphastomics.preprocessing.resume import write_marker


@pytest.mark.parametrize("altered", ['{"epochs": 90}', "{", "[]"])
def test_an_altered_number_of_epochs_is_refused(altered, tmp_path: Path):
    path = tmp_path / "judged.json"
    judged = {"epochs": 9, "summary": {"steps": 3}, "verdict": {"sentences": []}}
    write_marker(path, judged)
    assert read_record(path) == judged
    if altered.startswith('{"'):
        altered = json.dumps({**json.loads(path.read_text()), **json.loads(altered)})
    path.write_text(altered)
    with pytest.raises(InputError, match=r"judged\.json: damaged"):
        read_record(path)


@pytest.mark.parametrize(
    ("best", "epochs"), [(200, 100), (140, 100), (120, 60), (40, 50), (None, 100)]
)
def test_a_training_is_cut_where_it_was_best_but_not_before_half_of_it(best, epochs):
    assert chosen_epochs({"best_step": best, "steps": 200}, planned=100) == epochs
