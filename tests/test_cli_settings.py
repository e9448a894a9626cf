"""Settings on the command line: any by `--set`, and what is said of one that is given wrongly."""

import re

import pytest

from alphastomics.cli.parse import parse_arguments
from alphastomics.errors import InputError


def test_every_setting_can_be_given_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--set", "model.d_model=128", "diffusion.nu_position=2", "--set"]
    found = parse_arguments(["train", *words, "TransformerLayer_setting.use_moe=true"]).config
    assert (found.model.d_model, found.diffusion.nu_position) == (128, 2.0)
    assert found.layer.use_moe
    linear = ["train", "--set", "TransformerLayer_setting.use_gated_attention=false"]
    assert parse_arguments(linear).config.layer.attention == "linear"
    assert parse_arguments(["train", "--d_model", "128"]).config.model.d_model == 128


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train --set d_model=128", "unknown setting; did you mean model.d_model?"),
        ("train --set model.d_model", "expected KEY=VALUE"),
        ("train --set model.d_model=wide", "--set model.d_model: expected a whole number"),
        ("train --set training.learning_rate=1 --lr 2", "is given twice (--lr)"),
        ("train --d_ff 128", "it is a setting: give --set model.d_ff=VALUE"),
        ("train --nu-position 2", "it is a setting: give --set diffusion.nu_position=VALUE"),
    ],
)
def test_a_setting_that_is_given_wrongly_gets_a_hint(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=re.escape(words)):
        parse_arguments(arguments.split())
