"""Settings that follow from the data: valid for all data, with a reason; what is set stays."""

import math
from itertools import pairwise
from typing import Any

import pytest

from alphastomics.config import Config
from alphastomics.config.auto import resolve_config, set_values, with_settings
from alphastomics.config.file import document_fields, parse_document
from alphastomics.config.plan import Device, TrainingPlan
from alphastomics.config.section import is_auto
from alphastomics.diffusion_model.train import check_data
from alphastomics.preprocessing.schema import Metadata

pytestmark = pytest.mark.usefixtures("whole_position_head")

CPU, GPU = Device("cpu", "2 CPU cores", 1, 2), Device("gpu", "a GPU", 1, 16)
AUTO = sorted(
    path
    for path, field in document_fields().items()
    if is_auto(field) and not path.startswith("TransformerLayer_setting")
)


def metadata_for(sizes: list[int], genes: int = 200, **options: Any) -> Metadata:
    """Metadata of slices of these sizes, all their cells in training; there are no files."""
    dims = options.pop("dims", 2)
    cells = sum(sizes)
    nothing = {"cells": 0, "shards": []}
    shard = {"file": "data/train.parquet", "cells": cells, "bytes": 1, "sha256": "0" * 64}
    shard |= {"row_groups": [cells], "slices": None}
    slices = [
        {
            "name": f"s{number}",
            "dataset": 0,
            "file": "f.h5ad",
            "cells": size,
            "cells_per_split": {"train": size, "validation": 0, "test": 0},
            "panel": 0,
            "z": None if dims == 3 else 10.0 * number,
        }
        for number, size in enumerate(sizes)
    ]
    record = {
        "format_version": 1,
        "version": "0.1.0",
        "num_genes": genes,
        "genes": [f"g{number}" for number in range(genes)],
        "cell_types": None,
        "layout": "shuffled",
        "storage": "dense",
        "split_by": "cell",
        "normalization": {
            "log_normalize": True,
            "target_sum": 1e4,
            "scale": True,
            "absent_value": "0",
        },
        "position_statistics": None,
        "splits": {"train": {"cells": cells, "shards": [shard]}}
        | {"validation": nothing, "test": nothing},
        "slices": slices,
        "panels": [{"missing": []}],
        "scaling_sha256": None,
        "provenance": {"datasets": [], "request": {}},
    }
    return Metadata.model_validate(record | options)


DATA = {
    "50 cells": metadata_for([50]),
    "500 cells": metadata_for([500]),
    "one slice": metadata_for([12_345]),
    "uneven slices": metadata_for([600, 10, 10, 10]),
    "200 slices of 50 cells": metadata_for([50] * 200),
    "200 slices of 50 cells in one frame": metadata_for([50] * 200, common_frame=True),
    "3D": metadata_for([4000] * 3, dims=3),
    "20,000 genes": metadata_for([5000] * 4, genes=20_000),
    "10 million cells": metadata_for([50_000] * 200),
    "10 million cells of one frame": metadata_for([50_000] * 200, genes=2000, common_frame=True),
}


def plan_for(settings: dict[str, Any], metadata: Metadata, device: Device = CPU) -> TrainingPlan:
    return resolve_config(parse_document(nested(settings), "settings"), metadata, device)


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for path, value in settings.items():
        node = document
        *sections, name = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return document


def value_of(config: Config, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", DATA)
def test_all_data_get_a_valid_plan_without_a_setting(name, device):
    metadata = DATA[name]
    plan = resolve_config(Config(), metadata, device)
    config, cells = plan.config, metadata.splits["train"].cells
    check_data(config, metadata)
    assert Config.model_validate(config.model_dump()) == config
    assert config.training.batch_size % config.data.loading.set_size == 0
    assert config.data.loading.set_size <= 1024
    assert config.model.d_model % config.model.n_heads == 0
    assert config.sampling.num_steps <= config.diffusion.num_timesteps
    assert 100 <= plan.updates <= 1_000_000
    assert plan.seconds > 0
    if device == CPU and cells <= 10_000 and metadata.num_genes <= 1000:
        assert plan.seconds <= 10 * 60
    assert plan.lines()[0] == f"plan for {device.name}: {plan.outline()}"
    assert len(plan.lines()) == 1 + len(plan.choices)


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", DATA)
def test_a_resolved_setting_has_a_reason_and_every_other_keeps_its_default(name, device):
    plan = resolve_config(Config(), DATA[name], device)
    chosen = {choice.key: choice for choice in plan.choices}
    assert len(chosen) == len(plan.choices)
    for choice in plan.choices:
        assert choice.reason
        assert len(choice.reason) < 80
        assert "\n" not in choice.reason
        assert value_of(plan.config, choice.key) == choice.value
    for path in set(AUTO) - set(chosen):
        assert value_of(plan.config, path) == document_fields()[path].default
    assert set(chosen) <= set(AUTO), "what is not marked is not touched"


SET = {
    "model.d_model": 62,
    "model.n_heads": 2,
    "model.n_layers": 2,
    "model.dropout": 0.05,
    "model.input_dropout": 0.1,
    "model.smoothing_rounds": 1,
    "model.smoothing_dropout": 0.1,
    "diffusion.equal_time_share": 0.5,
    "diffusion.condition_share": 0.7,
    "diffusion.position_frame": "random",
    "diffusion.full_noise_share": 0.1,
    "diffusion.num_timesteps": 10,
    "expression.space": "genes",
    "expression.updates": 12,
    "training.batch_size": 36,
    "training.learning_rate": 3e-5,
    "training.weight_decay": 0.0,
    "training.max_epochs": 7,
    "training.position_head_updates": 11,
    "training.early_stopping": True,
    "training.validate_every_n_epochs": 3,
    "loss.lambda_expression": 2.0,
    "loss.position": "both",
    "data.loading.set_size": 17,
    "data.loading.streaming": True,
    "sampling.num_steps": 9,
}


def test_every_setting_that_follows_the_data_is_tried_here():
    assert set(AUTO) <= set(SET)


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("key", SET)
def test_what_the_user_sets_stays_and_the_rest_follows(key, device):
    metadata = DATA["200 slices of 50 cells"]
    plan = plan_for({key: SET[key]}, metadata, device)
    assert value_of(plan.config, key) == SET[key]
    assert key not in {choice.key for choice in plan.choices}
    assert plan.config.sampling.num_steps <= plan.config.diffusion.num_timesteps
    assert plan.config.training.batch_size % plan.config.data.loading.set_size == 0
    assert plan.config.model.d_model % plan.config.model.n_heads == 0


def test_a_value_that_is_set_to_its_default_stays_too():
    config = parse_document({"model": {"d_model": 256}, "training": {"batch_size": "auto"}}, "x")
    plan = resolve_config(config, DATA["500 cells"], CPU)
    assert plan.config.model.d_model == 256
    keys = {choice.key for choice in plan.choices}
    assert "model.d_model" not in keys
    assert "training.batch_size" in keys


def test_who_sets_the_epochs_gets_one_training_as_asked():
    plan = plan_for({"training.max_epochs": 7}, DATA["3D"])
    assert (plan.holdout, plan.refit) == (None, False)
    assert plan.config.training.max_epochs == 7
    assert plan.config.training.validate_every_n_epochs == 1
    assert plan.outline().startswith(f"one training of {plan.updates:,} updates, about ")


def test_little_data_is_fitted_again_on_everything_and_much_is_not():
    small, large = (
        resolve_config(Config(), DATA[name], GPU) for name in ("3D", "10 million cells")
    )
    assert (small.holdout.kind, small.refit) == ("slice", True)
    assert (large.holdout.kind, large.refit) == ("slice", False)
    assert "then on everything" in small.outline()
    assert "then on everything" not in large.outline()


def test_several_devices_hold_nothing_out():
    assert resolve_config(Config(), DATA["3D"], GPU._replace(number=2)).holdout is None
    assert plan_for({"distributed.num_nodes": 2}, DATA["3D"], GPU).holdout is None


def test_the_plan_is_a_function_of_settings_data_and_device_alone():
    for metadata in DATA.values():
        one, two = (resolve_config(Config(), metadata, GPU) for _ in range(2))
        assert one == two


def test_more_cells_never_get_fewer_updates_or_a_smaller_network():
    plans = [
        resolve_config(Config(), metadata_for([n]), GPU) for n in (500, 5_000, 50_000, 500_000)
    ]
    for smaller, larger in pairwise(plans):
        assert smaller.updates <= larger.updates * 1.1  # whole epochs
        assert smaller.config.model.d_model <= larger.config.model.d_model


def test_updates_are_those_of_the_epochs():
    for name in ("50 cells", "one slice", "200 slices of 50 cells", "3D"):
        plan = resolve_config(Config(), DATA[name], GPU)
        training, loading = plan.config.training, plan.config.data.loading
        sizes = [record.cells for record in DATA[name].slices]
        sets = sum(math.ceil(size / loading.set_size) for size in sizes)
        per_epoch = math.ceil(sets / (training.batch_size // loading.set_size))
        assert plan.updates == training.max_epochs * per_epoch


def test_set_values_are_what_was_set_and_with_values_sets_them():
    values = {"training.max_epochs": 3, "data.loading.set_size": None, "model.d_model": 64}
    config = with_settings(parse_document({}, "x"), values)
    assert values.items() <= dict(set_values(config)).items()
    assert dict(set_values(parse_document({"model": {"d_model": 64}}, "x"))) == {
        "model.d_model": 64
    }


def test_a_large_data_set_in_one_frame_gets_the_documented_values_on_a_gpu():
    plan = resolve_config(Config(), DATA["10 million cells of one frame"], GPU)
    document = dict(set_values(plan.config))
    expected = {
        "model.d_model": 256,
        "model.n_heads": 8,
        "model.n_layers": 6,
        "model.dropout": 0.1,
        "training.batch_size": 1024,
        "training.learning_rate": 1e-4,
        "training.weight_decay": 1e-5,
        "training.max_epochs": 100,
        "training.early_stopping": True,
        "sampling.num_steps": 50,
    }
    assert {key: document[key] for key in expected} == expected
    own = resolve_config(Config(), DATA["10 million cells"], GPU).config
    assert own.training.learning_rate != 1e-4


@pytest.mark.parametrize(
    "setting",
    [
        {"training.mode": "pos_to_expr"},
        {"model.smoothing_rounds": 0},
        {"diffusion.position_frame": "random"},
    ],
)
def test_without_a_position_head_the_plan_says_nothing_of_it(setting):
    key = "training.position_head_updates"
    assert key in {choice.key for choice in plan_for({}, DATA["3D"]).choices}
    plan = plan_for(setting, DATA["3D"])
    assert not plan.config.has_position_head
    assert key not in {choice.key for choice in plan.choices}


@pytest.mark.parametrize("cells", [500, 1_000, 5_000, 10_000])
@pytest.mark.parametrize("genes", [30, 300, 1_000, 2_000, 5_000])
def test_ten_thousand_cells_are_planned_for_ten_minutes_of_two_cores(cells, genes):
    plan = plan_for({}, metadata_for([cells], genes))
    assert plan.seconds <= 600
    # Not by doing nothing.
    assert plan.updates >= 150
    assert plan.config.training.position_head_updates >= 200
    assert plan.config.expression.updates >= 90


def test_what_is_not_fitted_takes_no_time_from_the_rest():
    data = metadata_for([10_000], 2_000)
    head = "training.position_head_updates"
    plans = [plan_for(setting, data) for setting in ({}, {"expression.space": "genes"})]
    updates = [plan.config.training.position_head_updates for plan in plans]
    assert updates[0] < updates[1]
    count = [plan_for(s, data).config.expression.updates for s in ({}, {head: 100})]
    assert count[0] < count[1]
    assert all(plan.seconds <= 600 for plan in plans)


@pytest.mark.parametrize(
    ("epochs", "held", "between"),
    [(7, 100, 1), (30, 0, 1), (100, 100, 3), (100, 10, 1), (20, 500, 2)],
)
def test_validations_take_a_twentieth_of_the_time_or_are_ten(epochs, held, between):
    # 100 of 1,000 cells: four calls without backward are 4/3 x 0.1 of an epoch, in three 0.044.
    metadata = metadata_for([1_000])
    validation = metadata.splits["validation"].model_copy(update={"cells": held})
    splits = metadata.splits | {"validation": validation}
    metadata = metadata.model_copy(update={"splits": splits})
    plan = plan_for({"training.max_epochs": epochs}, metadata)
    assert plan.config.training.validate_every_n_epochs == between


@pytest.mark.parametrize(
    ("genes", "cells"), [(250, 512), (4_000, 375), (10_000, 150), (60_000, 128)]
)
def test_sets_of_very_many_genes_are_smaller_on_a_cpu(genes, cells):
    # A batch of two sets holds at most three million values, and no set is below 128 cells.
    chosen = plan_for({}, metadata_for([cells * 40], genes)).config
    assert chosen.data.loading.set_size == cells
    assert chosen.training.batch_size == 2 * cells
    resolved = resolve_config(Config(), metadata_for([10_240], genes), GPU).config
    assert resolved.data.loading.set_size == 1024


@pytest.mark.parametrize(
    ("normalization", "said"),
    [
        ({}, "drawn as counts"),
        ({"fractions": True}, "no counts"),
        ({"log_normalize": False}, "if "),
    ],
)
def test_the_plan_says_what_generated_values_are_drawn_from(normalization, said):
    metadata = metadata_for([1_000])
    changed = metadata.normalization.model_copy(update=normalization)
    plan = plan_for({}, metadata.model_copy(update={"normalization": changed}))
    choice = next(choice for choice in plan.choices if choice.key == "expression.space")
    assert said in choice.reason
