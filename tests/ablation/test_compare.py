"""The comparison: what is compared, a whole small one, and what it refuses."""

import copy
import csv
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alphastomics.diffusion_model.checkpoint import load_module
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.errors import InputError
from alphastomics.evaluation.methods import MODEL
from alphastomics.evaluation.ranks import distance_spearman
from alphastomics.generation.cells import InputCells
from alphastomics.generation.evaluate import evaluate
from benchmarks.ablation import runs as runs_module
from benchmarks.ablation.commands import compare_configs
from benchmarks.ablation.configurations import FOUR, Configuration, chosen
from benchmarks.ablation.drawing import averaged, forests
from benchmarks.ablation.figures import FIGURES
from benchmarks.ablation.findings import conclude, expectations
from benchmarks.ablation.page import render
from benchmarks.ablation.runs import Budget, Run
from benchmarks.ablation.scoring import held_out, place_figures, scores
from benchmarks.ablation.tables import markdown
from tests.diffusion_model.conftest import tiny_config

ROOT = Path(__file__).parents[2]


def base_config() -> dict:
    spec = importlib.util.spec_from_file_location("compare_configs", ROOT / "compare_configs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BASE_CONFIG


SMALL = [
    *("--device", "cpu", "--epochs", "1", "--set", "simulation.cells=60", "simulation.slices=4"),
    *("simulation.genes=20", "model.d_model=16", "model.d_ff=32", "training.batch_size=30"),
    *("data.loading.set_size=30", "data.preprocessing.train_ratio=0.5", "sampling.num_samples=1"),
    *("data.preprocessing.val_ratio=0.25", "logging.log_every_n_steps=1", "model.n_layers=3"),
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """The four configurations with three seeds, one epoch each."""
    folder = tmp_path_factory.mktemp("compared")
    compare_configs(base_config(), ["--output_dir", str(folder), *SMALL])
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_all_files_are_written_and_every_figure_is_found(compared):
    names = {path.name for path in compared.iterdir() if path.is_file()}
    assert names == {
        *("comparison.md", "comparison.html", "comparison.json"),
        *("runs.csv", "differences.csv", "curves.csv"),
    }
    rows = rows_of(compared / "runs.csv")
    assert [(row["configuration"], row["seed"]) for row in rows] == [
        (one.name, str(seed)) for seed in (1, 2, 3) for one in FOUR
    ]
    for row in rows:
        assert all(row[figure.key] for figure in FIGURES)


def test_budgets_are_equal(compared):
    steps: dict[str, set] = {}
    for row in rows_of(compared / "curves.csv"):
        steps.setdefault(row["configuration"], set()).add((row["seed"], row["name"], row["step"]))
    assert len(steps) == 4
    assert len({frozenset(one) for one in steps.values()}) == 1


def test_experts_are_idle_in_the_mixtures_alone(compared):
    for row in rows_of(compared / "runs.csv"):
        share, mixed = float(row["feed_forward_share"]), "MoE" in row["configuration"]
        assert (share < 0.6) if mixed else (share == 1)
        assert (float(row["parameters_active"]) < float(row["parameters_total"])) == mixed


def test_words_and_expectations_are_those_of_the_figures(compared):
    content = json.loads((compared / "comparison.json").read_text(encoding="utf-8"))
    assert len(content["once_expected"]) == 6
    assert len(content["in_words"]) == 4
    told = (compared / "comparison.md").read_text(encoding="utf-8")
    page = (compared / "comparison.html").read_text(encoding="utf-8")
    for sentence in content["in_words"]:
        assert sentence in told
    for row in content["once_expected"]:
        assert row["measured"] in told
        assert row["measured"] in page
    assert page.count('class="plotly-graph-div"') == 7  # five metrics, two losses
    assert "src=" not in page.partition("<body>")[2]  # nothing is loaded from elsewhere


def test_a_second_call_trains_nothing_and_finds_the_same(compared, monkeypatch):
    before = (compared / "runs.csv").read_bytes()
    monkeypatch.setattr(runs_module, "train", None)
    compare_configs(base_config(), ["--output_dir", str(compared), *SMALL])
    assert (compared / "runs.csv").read_bytes() == before


def test_runs_of_other_settings_are_refused_and_nothing_is_lost(compared):
    before = (compared / "runs.csv").read_bytes()
    with pytest.raises(InputError, match=r"baseline-seed1.json: a run with other settings"):
        compare_configs(
            base_config(), ["--output_dir", str(compared), *SMALL, "training.learning_rate=1e-5"]
        )
    assert (compared / "runs.csv").read_bytes() == before


def test_the_scripts_settings_stay_as_they_are(compared):
    document = base_config()
    before = copy.deepcopy(document)
    compare_configs(document, ["--output_dir", str(compared), *SMALL])
    assert document == before


@pytest.fixture
def budget(tmp_path) -> Budget:
    return Budget(base_config(), tmp_path / "data", "test", 100, "cpu", tmp_path)


@pytest.mark.parametrize("configuration", chosen(full=True), ids=lambda one: one.name)
def test_a_configuration_is_what_its_name_says(configuration, budget):
    layer = budget.settings(configuration, 7).layer
    name = configuration.name
    assert (layer.attention == "linear") == (name in ("Baseline", "MoE"))
    assert layer.use_moe == ("MoE" in name)
    for gate in ("headwise", "elementwise", "none"):
        if name.startswith(gate):
            assert (layer.gate, layer.use_qk_norm) == (gate, "no QK-norm" not in name)
    if "top-" in name:
        size = f"{layer.num_experts} top-{layer.moe_top_k} {layer.moe_expert_size}"
        assert name == f"Gated + MoE {size}"


def test_full_has_every_gate_norm_and_mixture_once(budget):
    configurations = chosen(full=True)
    layers = [budget.settings(one, 1).layer.model_dump_json() for one in configurations]
    assert len(set(layers)) == len(layers) == 20
    assert configurations[:4] == list(FOUR)
    assert len({budget.record(one, 1) for one in configurations}) == 20


def test_edits_of_the_base_config_reach_every_configuration(budget):
    layer = {"gate_type": "elementwise", "use_qk_norm": False, "num_experts": 8, "moe_top_k": 1}
    edited = replace(budget, document={**budget.document, "TransformerLayer_setting": layer})
    found = {one.name: edited.settings(one, 1).layer for one in FOUR}
    assert (found["Gated"].gate, found["Gated"].use_qk_norm) == ("elementwise", False)
    assert (found["MoE"].attention, found["MoE"].num_experts, found["MoE"].moe_top_k) == (
        *("linear", 8, 1),
    )
    assert found["Gated + MoE"].num_experts == 8
    names = [one.name for one in chosen(full=True, layer=layer)]
    assert "Gated + MoE 4 top-2 split" in names
    assert "elementwise gate, no QK-norm" not in names


def test_scores_are_those_of_test(processed, tmp_path):
    summary = train(tiny_config(processed, tmp_path), TrainRequest())
    module, genes = load_module(Path(summary["last_checkpoint"]))
    cells = held_out(processed, genes, "test", 1000)
    ours = scores(module, cells, 3)
    settings = module.config.sampling.model_copy(update={"num_steps": 2})
    found = evaluate(module, cells, None, settings, 3)
    theirs = found["expr_to_pos"][MODEL] | found["pos_to_expr"][MODEL]
    for key in ("distance_mse", "procrustes", "knn_preservation", "expression_mse", "moran_mae"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-6), key
    few = held_out(processed, genes, "test", 11)
    assert [len(few.rows_of(n)) for n in range(len(few.slice_names))] == [11, 11, 11]


def fake_runs(name: str) -> list[Run]:
    return [
        Run(one, seed, {f.key: 1.0 + (one == name) * 0.1 * seed for f in FIGURES}, curve)
        for one in ("Baseline", name)
        for seed, curve in ((1, [("val/loss", 0, 2.0), ("val/loss", 5, 1.0)]), (2, []), (3, []))
    ]


def test_a_name_stays_text_on_the_page_and_in_the_table():
    runs = fake_runs("<script>alert(1)</script> | & more")
    findings = conclude(runs, "Baseline")
    page = render(findings, runs, ["<b>about</b>"]).partition("<body>")[2]
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert "<b>" not in page
    assert "\\| & more" in markdown(findings, [])
    assert len(forests(findings)) == 5


def test_nothing_was_expected_against_another_reference():
    assert len(expectations(conclude(fake_runs("Gated"), "Baseline"))) == 2
    assert expectations(conclude(fake_runs("Gated"), "Gated")) == []


def test_curves_are_means_over_seeds_with_their_band():
    curves = ([("val/loss", 1, 1.0), ("val/loss", 9, 4.0)], [("val/loss", 1, 3.0)])
    runs = [Run("one", seed, {}, list(curve)) for seed, curve in enumerate(curves)]
    assert averaged(runs, "val/loss") == [(1.0, 2.0, 1.0, 3.0), (9.0, 4.0, 4.0, 4.0)]
    assert averaged(runs, "train/loss") == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seeds", "1", "1"], "names a seed twice"),
        (["--seeds", "-1"], "seed.global_seed"),
        (["--epochs", "0"], "training.max_epochs"),
        (["--test_cells", "0"], "--test_cells"),
        (["--only", "Gate"], r"no configuration 'Gate'; known: Baseline; Gated"),
        (["--reference", "nothing"], "no configuration 'nothing'"),
        (["--set", "model.width=3"], "--set model.width=3: expected KEY=VALUE"),
        (["--set", "model.d_model"], "expected KEY=VALUE"),
        (["--set", "model.d_model=63"], "must divide"),
        (["--set", "training.early_stopping=true"], "training.early_stopping: must be false"),
        (["--set", "training.mode=expr_to_pos"], "training.mode: must be joint"),
        (["--set", "TransformerLayer_setting.use_gated_attention=true"], "--only"),
        (["--device", "cuda"], "no usable GPU"),
        (["--data_dir", "nowhere"], "nowhere"),
        (["--set", "training.batch_size=1048576"], "training.batch_size"),
        (["--set", "data.preprocessing.val_ratio=0.375"], "test split"),
        (["--full", "--set", "model.d_ff=24"], "num_experts"),
    ],
)
def test_a_mistake_is_told_before_anything_is_trained(argv, words, tmp_path, monkeypatch):
    if "cuda" in argv:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(runs_module, "train", None)
    folder = ["--output_dir", str(tmp_path), "--device", "cpu"]
    with pytest.raises(InputError, match=words):
        compare_configs(base_config(), [*folder, *SMALL[2:4], *argv])


def test_a_damaged_run_is_told(tmp_path):
    path = tmp_path / "runs" / "baseline-seed1.json"
    path.parent.mkdir()
    path.write_text('{"settings": 3}')
    with pytest.raises(InputError, match="not a run of a comparison"):
        runs_module.read_run(path, Configuration("Baseline", {}), 1, {"settings": {}})


def test_a_spearman_that_is_undefined_for_a_cell_does_not_spoil_the_mean():
    # The true distances of the first cell are all equal: its Spearman is undefined.
    directions = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]] * 4)[:13]
    true = np.zeros((14, 3), np.float32)
    true[1:, :2] = directions
    cells = InputCells(
        expression=np.ones((14, 2), np.float32),
        measured=np.ones((1, 2), bool),
        position=true,
        dims=2,
        slice_id=np.zeros(14, np.int64),
        slice_names=["s"],
        cell_type=None,
    )
    predicted = np.random.default_rng(0).normal(size=(14, 3)).astype(np.float32)
    assert np.isnan(distance_spearman(predicted[:, :2], true[:, :2]).numpy()).any()
    assert np.isfinite(place_figures(cells, np.arange(14), predicted)["spearman_mean"])
