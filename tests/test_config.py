"""The configuration: documented spellings, one home of defaults, and clear refusals."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from alphastomics.config import Config, LayerConfig
from alphastomics.config.file import (
    SECOND_NAMES,
    ConfigLoader,
    as_config,
    commented_yaml,
    document_fields,
    parse_document,
    read_document,
    to_document,
    to_yaml,
)
from alphastomics.config.section import is_auto
from alphastomics.errors import InputError

ROOT = Path(__file__).parent.parent

CONTRACT = """
seed:      {global_seed: 42, deterministic: false}
model:     {num_genes: null, d_model: 256, n_heads: 8, n_layers: 6, d_ff: null, dropout: 0.1}
diffusion: {num_timesteps: 1000, schedule: cosine, prediction_type: x0, nu_expression: 1.0, nu_position: 1.0}
training:  {mode: joint, batch_size: 1024, learning_rate: 1.0e-4, weight_decay: 1.0e-5, max_epochs: 100, precision: auto,
            gradient_clip_val: 1.0, accumulate_grad_batches: 1, early_stopping: true, patience: 10}
masking:   {enable: false, expression_mask_ratio: 0.3, position_mask_ratio: 0.33, mask_strategy: random,
            reconstruction_weight: 0.5, masking_probability: 1.0, progressive_masking: false, progressive_steps: 10000}
loss:      {lambda_expression: 1.0, lambda_position: 1.0}
data:      {processed_data_dir: ./processed, preprocessing: {normalize_position: false, scale: true}, loading: {num_workers: 4}}
distributed: {strategy: auto, num_nodes: 1, devices: auto, deepspeed: {stage: 2}, fsdp: {sharding_strategy: FULL_SHARD}}
sampling:  {num_steps: 50, mode: joint}
logging:   {logger: csv, wandb_project: alphastomics, log_every_n_steps: 10, save_top_k: 3, save_dir: ./outputs}
TransformerLayer_setting: {num_layers: 6, num_heads: 8, use_gated_attention: true, gate_type: headwise, use_qk_norm: true,
            use_moe: false, num_experts: 4, moe_top_k: 2, moe_load_balance_loss_weight: 0.01, dropout: 0.1}
"""  # noqa: E501 - the contract's own lines


def parse(text: str) -> Config:
    return parse_document(yaml.load(text, Loader=ConfigLoader) or {}, "config.yaml")


def leaves(document: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in document.items():
        inner = leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        flat |= inner if inner is not None else {f"{prefix}{key}": value}
    return flat


def test_the_contracts_file_is_exactly_the_defaults():
    assert parse(CONTRACT) == Config()


def test_the_projects_config_yaml_is_what_the_schema_says():
    assert (ROOT / "config.yaml").read_text(encoding="utf-8") == commented_yaml()


def test_config_yaml_holds_every_key_and_reads_as_the_defaults():
    document = read_document(ROOT / "config.yaml")
    assert set(leaves(document)) == set(document_fields())
    assert parse_document(document, "config.yaml") == Config()


def test_config_yaml_leaves_what_follows_from_the_data_at_auto_and_nothing_else():
    document = leaves(read_document(ROOT / "config.yaml"))
    follows = {path for path, field in document_fields().items() if is_auto(field)}
    own = {"data.loading.set_draw", "training.precision"}
    own |= {"distributed.strategy", "distributed.devices", "extract.mode"}
    assert {path for path, value in document.items() if value == "auto"} == follows | own
    contract = leaves(yaml.load(CONTRACT, Loader=ConfigLoader))
    for path in follows & set(contract):
        assert document_fields()[path].default == contract[path]


def test_auto_is_the_same_as_not_set_and_is_refused_where_nothing_follows():
    config = parse("training: {batch_size: auto, max_epochs: 3}")
    assert config.training.model_fields_set == {"max_epochs"}
    with pytest.raises(InputError, match=r"training\.patience: expected a whole number"):
        parse("training: {patience: auto}")


def test_every_setting_says_what_it_means():
    assert [path for path, field in document_fields().items() if not field.description] == []


def test_an_empty_file_gives_the_defaults(tmp_path: Path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert parse_document(read_document(path), "empty.yaml") == Config()


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", "0.0001", "1.0e-4", "+1e-4"])
def test_a_number_in_any_spelling_is_a_number(text: str):
    assert parse(f"training: {{learning_rate: {text}}}").training.learning_rate == 1e-4


def test_second_names_set_the_same_setting():
    config = parse("TransformerLayer_setting: {num_layers: 3, num_heads: 4, dropout: 0.2}")
    assert (config.model.n_layers, config.model.n_heads, config.model.dropout) == (3, 4, 0.2)


@pytest.mark.parametrize(
    ("layer", "attention", "gate"),
    [
        ("{}", "softmax", "headwise"),
        ("{use_gated_attention: true, gate_type: elementwise}", "softmax", "elementwise"),
        ("{gate_type: none}", "softmax", "none"),
        ("{use_gated_attention: false}", "linear", "none"),
        ("{use_gated_attention: false, gate_type: headwise}", "linear", "none"),
    ],
)
def test_the_documented_attention_keys_are_one_choice_each(layer, attention, gate):
    config = parse(f"TransformerLayer_setting: {layer}")
    assert (config.layer.attention, config.layer.gate) == (attention, gate)


def test_an_attention_that_is_neither_true_nor_false_is_written_and_read_by_its_name():
    class Wider(LayerConfig):
        attention: Annotated[
            Literal["softmax", "linear", "cosine"], *LayerConfig.model_fields["attention"].metadata
        ] = Field("softmax", alias="use_gated_attention")

    for attention, written in (("softmax", True), ("linear", False), ("cosine", "cosine")):
        document = Wider(attention=attention).model_dump(mode="json", by_alias=True)
        assert document["use_gated_attention"] == written
        assert Wider.model_validate(document).attention == attention


@pytest.mark.parametrize("value", ["32", "'32'"])
def test_precision_32_may_be_a_number_or_a_text(value: str):
    assert parse(f"training: {{precision: {value}}}").training.precision == "32"


def test_a_plain_dict_serves_as_a_config():
    assert as_config({"model": {"d_model": 64}}).model.d_model == 64
    assert as_config(Config()) == Config()


def test_a_resolved_config_reads_back_as_itself():
    config = parse(
        "{model: {d_model: 64, num_genes: 7}, training: {learning_rate: 3e-5, precision: 32}, "
        "distributed: {devices: 2}, TransformerLayer_setting: {use_gated_attention: false}}"
    )
    assert parse(to_yaml(config)) == config


REFUSALS = {
    "traning: {lr: 1}": "traning.lr: unknown key; did you mean training.learning_rate?",
    "training: {batchsize: 1}": "training.batchsize: unknown key; did you mean training.batch_size",
    "modle: {d_model: 1}": "modle.d_model: unknown key; did you mean model.d_model?",
    "modle: 3": "did you mean the section model?",
    "nonsense_word: 3": "nonsense_word: unknown key; known here: seed, model",
    "training: {batch_size: many}": "training.batch_size: expected a whole number of at least 1",
    "training: {batch_size: '64'}": "training.batch_size: expected a whole number",
    "training: {batch_size: true}": "training.batch_size: expected a whole number",
    "training: {batch_size: 1.5}": "training.batch_size: expected a whole number",
    "training: {batch_size: 0}": "a whole number of at least 1 or auto, got 0",
    "training: {learning_rate: .nan}": "learning_rate: expected a number above 0 or auto, got nan",
    "training: {learning_rate: .inf}": "training.learning_rate",
    "training: {learning_rate: null}": "training.learning_rate",
    "training: {mode: jont}": "one of: joint, expr_to_pos, pos_to_expr (did you mean joint?)",
    "training: {early_stopping: 1}": "training.early_stopping: expected true or false",
    "training: [1, 2]": "training: expected keys below it (mode, batch_size",
    "model: {n_heads: 7}": "model.n_heads (7) must divide model.d_model (256)",
    "model: {dropout: 1.0}": "model.dropout",
    "masking: {position_mask_ratio: 1.5}": "masking.position_mask_ratio: expected a number of at",
    "masking: {expression_mask_ratio: -0.1}": "masking.expression_mask_ratio",
    "data: {preprocessing: {train_ratio: 0.9, val_ratio: 0.2}}": "must sum to at most 1",
    "data: {preprocessing: {train_ratio: 2}}": "data.preprocessing.train_ratio",
    "data: {preprocessing: {normalize_position: true}}": "coordinates keep their original values",
    "TransformerLayer_setting: {moe_top_k: 5}": "TransformerLayer_setting.moe_top_k (5) must be at",
    "{model: {n_layers: 8}, TransformerLayer_setting: {num_layers: 6}}": "one setting with two",
    "TransformerLayer_setting: {use_gated_attention: 3}": "use_gated_attention: expected true or",
    "TransformerLayer_setting: {gate_type: headwide}": "did you mean headwise?",
    "TransformerLayer_setting: {num_heads: 0}": "TransformerLayer_setting.num_heads: expected",
    "{model: {d_ff: 6}, TransformerLayer_setting: {use_moe: true}}": "must divide the feed-forward",
    "{training: {batch_size: 10}, data: {loading: {set_size: 3}}}": "must be a multiple of",
    "distributed: {devices: some}": "expected auto or a whole number",
    "distributed: {deepspeed: {stage: 4}}": "distributed.deepspeed.stage: expected one of: 1, 2, 3",
    "logging: {exp_name: ../up}": "logging.exp_name: expected a folder name without slashes",
    "logging: {save_dir: ''}": "logging.save_dir: expected a text that is not empty",
    "seed: {global_seed: -1}": "seed.global_seed",
    "model: {d_model: 1" + "0" * 400 + "}": "model.d_model",
}


@pytest.mark.parametrize("text", REFUSALS)
def test_a_mistake_is_refused_with_its_path(text: str):
    with pytest.raises(InputError) as refusal:
        parse(text)
    message = str(refusal.value)
    assert message.startswith("config.yaml: ")
    assert REFUSALS[text] in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- a\n- b\n", "expected sections"),
        (b"just words", "expected sections"),
        (b"a: [1, 2", "not valid YAML"),
        (b"a: b: c", "not valid YAML"),
        (b"training: {mode: joint}\ntraining: {patience: 3}\n", "'training' is given twice"),
        (b"\xff\xfe\x00bad", "not a text file"),
        (b"x: !!python/object/apply:os.system ['true']", "not valid YAML"),
        (b"\x00", "not valid YAML"),
        (b"a: &a\n  b: *a\n", "stands for more than"),
        (b"? [1, 2]\n: 3\n", "unhashable"),
        (b"x: 2026-99-99", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(tmp_path, content, words):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words) as refusal:
        parse_document(read_document(path), str(path))
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="is a folder"):
        read_document(tmp_path)
    with pytest.raises(InputError, match="no such"):
        read_document(tmp_path / "none.yaml")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["joint", "ddp", "auto", "random", "block", "split", "full", 1, 2, 3, 0.5]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def nested(flat: dict) -> dict:
    document: dict = {}
    for path, value in flat.items():
        node = document
        *sections, name = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return document


@given(st.dictionaries(st.sampled_from(sorted(document_fields())), VALUES, max_size=5))
def test_any_values_are_accepted_and_round_trip_or_are_refused_with_a_path(flat: dict):
    try:
        config = parse_document(nested(flat), "config")
    except InputError as error:
        assert any(path in str(error) for path in [*flat, *SECOND_NAMES.values()])
    else:
        assert parse(to_yaml(config)) == config
        assert as_config(to_document(config)) == config


@given(st.dictionaries(st.text(max_size=12), VALUES, max_size=4))
def test_any_document_is_accepted_or_refused_in_words(document: dict):
    try:
        config = parse_document(document, "config")
    except InputError as error:
        assert str(error).startswith("config: ")
    else:
        assert parse(to_yaml(config)) == config


@given(st.binary(max_size=60))
def test_any_bytes_are_accepted_or_refused_in_words(tmp_path_factory, content: bytes):
    path = tmp_path_factory.mktemp("fuzz") / "config.yaml"
    path.write_bytes(content)
    try:
        parse_document(read_document(path), "config")
    except InputError as error:
        assert len(str(error)) > len("config: ")


@pytest.mark.parametrize(("old", "new"), [("estimate", "mean"), ("sample", "sample")])
def test_the_product_of_version_0_1_is_read_as_the_estimator(old: str, new: str):
    document = {"sampling": {"product": old}}
    assert parse_document(document, "old.yaml").sampling.estimator == new
