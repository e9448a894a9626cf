"""Settings files that no sane person writes, given to the commands that read one."""

import pytest

from tests.faults.door import refused, require_no_accident

LAUGHS = "\n".join(
    ["a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    + [
        f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ]
)
MERGES = "\n".join(
    ["a: &a {k0: 1, k1: 2, k2: 3}"]
    + [
        f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ]
)
HOSTILE = {
    "unknown key": "training: {epochs: 3}",
    "unknown section": "trainig: {max_epochs: 3}",
    "text for a number": "training: {batch_size: many}",
    "list for a number": "training: {batch_size: [1, 2]}",
    "mapping for a number": "training: {batch_size: {a: 1}}",
    "number for a section": "training: 7",
    "list for a section": "training: [1]",
    "text for the whole": "training",
    "list for the whole": "- 1\n- 2\n",
    "number for the whole": "42",
    "nan learning rate": "training: {learning_rate: .nan}",
    "infinite learning rate": "training: {learning_rate: .inf}",
    "negative learning rate": "training: {learning_rate: -1.0}",
    "zero batch": "training: {batch_size: 0}",
    "negative batch": "training: {batch_size: -5}",
    "huge batch": "training: {batch_size: 100000000000000000000000000}",
    "huge exponent": "training: {learning_rate: 1e999}",
    "seed above 32 bits": "seed: {global_seed: 4294967296}",
    "a true seed": "seed: {global_seed: true}",
    "nan seed": "seed: {global_seed: .nan}",
    "fractional heads": "model: {n_heads: 2.5}",
    "heads that do not divide": "model: {d_model: 10, n_heads: 3}",
    "dropout of one": "model: {dropout: 1.0}",
    "more experts visited than there are": "TransformerLayer_setting: {moe_top_k: 9}",
    "unknown gate": "TransformerLayer_setting: {gate_type: sideways}",
    "text for a switch": "TransformerLayer_setting: {use_moe: maybe}",
    "two names, two values": "model: {n_heads: 8}\nTransformerLayer_setting: {num_heads: 4}",
    "duplicate key": "training: {batch_size: 3, batch_size: 4}",
    "duplicate section": "training: {batch_size: 3}\ntraining: {max_epochs: 4}",
    "tab for indent": "training:\n\tbatch_size: 3\n",
    "tab after a colon's block": "training:\n  batch_size: 3\n\tmax_epochs: 2\n",
    "binary": b"\x00\x01\x02\xff\xfe",
    "utf-16": "training: {batch_size: 3}".encode("utf-16"),
    "latin-1": "logging: {exp_name: caf\xe9}".encode("latin-1"),
    "nul byte": b"training: {batch_size: 3}\x00",
    "python object": "training: !!python/object/apply:os.system ['touch mark']",
    "python name": "training: {mode: !!python/name:os.system ''}",
    "anchor in itself": "training: &a {mode: *a}",
    "list in itself": "training: &a [*a]",
    "a billion laughs": LAUGHS + "\ntraining: *i\n",
    "a billion laughs as a value": LAUGHS + "\ntraining: {batch_size: *i}\n",
    "a billion merges": MERGES + "\ntraining: *i\n",
    "alias of nothing": "training: *nothing",
    "two documents": "training: {batch_size: 3}\n---\ntraining: {batch_size: 4}\n",
    "open bracket": "training: {batch_size: 3",
    "open quote": 'logging: {exp_name: "abc}',
    "3,000 open brackets": "a: " + "[" * 3_000,
    "deep nesting": "a: " + "{a: " * 3000 + "1" + "}" * 3000,
    "list as a key": "? [a, b]\n: 1\n",
    "number as a key": "1: 2\n",
    "null as a key": "null: 2\n",
    "impossible date": "training: {batch_size: 2026-13-45}",
    "date": "training: {batch_size: 2026-01-01}",
    "run outside": "logging: {exp_name: ../escaped}",
    "run at the root": "logging: {exp_name: /escaped}",
    "run of control letters": 'logging: {exp_name: "a\\u0007b"}',
    "empty folder": "data: {processed_data_dir: ''}",
    "ratios above one": "data: {preprocessing: {train_ratio: 0.9, val_ratio: 0.9}}",
    "one million experts": "TransformerLayer_setting: {use_moe: true, num_experts: 1000000}",
    "100,000 digits": "training: {batch_size: " + "9" * 100_000 + "}",
}
HARMLESS = {
    "empty": "",
    "comments": "# nothing\n",
    "null sections": "training:\nmodel:\n",
    "byte order mark": b"\xef\xbb\xbftraining: {batch_size: 3}",
    "windows line ends": "training:\r\n  batch_size: 3\r\n",
    "a number as people of old wrote time": "training: {batch_size: 190:20:30}",
    "an anchor": "model: {d_model: &n 8}",
    "an alias": "model: {d_model: &n 8, n_heads: *n}",
    "exponent without a dot": "training: {learning_rate: 1e-4}",
    "unicode name": "logging: {exp_name: über-実験}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_settings_that_cannot_be_meant_are_refused(name, door, work):
    content = HOSTILE[name]
    path = work / "in.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(door("info", "--config", path, "--num_genes", 5), "in.yaml")
    assert not (work / "mark").exists()


@pytest.mark.parametrize("name", HARMLESS)
def test_settings_that_look_odd_and_are_fine(name, door, work):
    content = HARMLESS[name]
    path = work / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    outcome = door("info", "--num_genes", 5)
    require_no_accident(outcome)
    assert outcome.status == 0, outcome.err


def test_a_bad_config_in_the_working_folder_is_found_by_every_command_that_reads_one(
    door, work, tiny
):
    (work / "config.yaml").write_text("training: {epochs: 3}")
    for line in (
        ["preprocess", "--input_dir", tiny.slices, "--output_dir", "out"],
        ["stage2", "--input_dirs", tiny.stage1, "--output_dir", "out"],
        ["train", "--data_dir", tiny.processed],
        ["test", "--checkpoint", tiny.checkpoint],
        ["sample", "--checkpoint", tiny.checkpoint, "--input_data", tiny.slice],
        ["extract", "--checkpoint", tiny.checkpoint],
        ["simulate", "--output_dir", "out"],
        ["info", "--num_genes", 5],
    ):
        refused(door(*line), "config.yaml: training.epochs: unknown key")
    assert door("config").status == 0


@pytest.mark.parametrize(
    ("setting", "argv"),
    [
        ('data: {processed_data_dir: "a\\0b"}', ["train"]),
        ('logging: {save_dir: "a\\0b"}', ["train"]),
        ('extract: {output: "a\\0b.npz"}', ["extract", "--checkpoint", "CHECKPOINT"]),
        ('data: {preprocessing: {position_key: "a\\0b"}}', ["preprocess", "--output_dir", "out"]),
        ('data: {preprocessing: {cell_type_key: "a\\0b"}}', ["preprocess", "--output_dir", "out"]),
    ],
)
def test_a_nul_byte_in_a_name_is_refused(setting, argv, door, work, tiny):
    base = tiny.config.read_text() if "data:" not in setting else ""
    (work / "in.yaml").write_text(f"{base}\n{setting}\n")
    argv = [tiny.checkpoint if word == "CHECKPOINT" else word for word in argv]
    slices = ["--input_dir", tiny.slices] if argv[0] == "preprocess" else []
    refused(door(*argv, *slices, "--config", work / "in.yaml"))
