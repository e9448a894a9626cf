"""Bytes at random places of files: the readers refuse them in one line, or read what was there.

Bounded and derandomised: the same examples every time.
"""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alphastomics.config import Config
from alphastomics.config.file import parse_document, read_document
from alphastomics.errors import InputError
from alphastomics.generation.cells import read_query
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.schema import Metadata, parse_metadata
from alphastomics.preprocessing.shard_reader import ShardReader
from tests.faults.door import alarm

FEW, MANY = 40, 1500
PATIENCE_SECONDS = 60
NORMALIZATION = {"log_normalize": True, "scale": True}

# A place as a share of the file, and what is put there.
EDITS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=8)),
    min_size=1,
    max_size=3,
)
LENGTHS = st.one_of(st.none(), st.floats(0, 1))
COUNTS = pytest.mark.parametrize(
    "examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"]
)


def edited(content: bytes, edits: list[tuple[float, bytes]], length: float | None) -> bytes:
    """Put bytes at some places, and cut the file off at another."""
    out = bytearray(content)
    for share, word in edits:
        place = int(share * len(out))
        out[place : place + len(word)] = word
    return bytes(out if length is None else out[: int(length * len(out))])


def bounded(examples: int):
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def one_line(error: InputError, path: Path) -> None:
    assert "\n" not in str(error)
    assert path.name in str(error)


@COUNTS
def test_an_h5ad_reader_refuses_or_reads(examples, tiny, tmp_path):
    content = tiny.slice.read_bytes()
    genes = tiny.genes.read_text().split()
    path = tmp_path / "fuzzed.h5ad"

    @bounded(examples)
    @given(EDITS, LENGTHS)
    def check(edits, length):
        path.write_bytes(edited(content, edits, length))
        try:
            with alarm(PATIENCE_SECONDS):
                cells = read_query(path, genes, NORMALIZATION, Config())
        except InputError as error:
            one_line(error, path)
        else:
            assert cells.expression.shape == (len(cells.names), len(genes))

    check()


@COUNTS
def test_a_parquet_reader_refuses_or_reads_even_without_checksums(examples, tiny, tmp_path):
    folder = tmp_path / "processed"
    shutil.copytree(tiny.processed, folder)
    shard = folder / "data/train.parquet"
    content = shard.read_bytes()
    metadata = DataFolder(folder).metadata()

    @bounded(examples)
    @given(EDITS, LENGTHS)
    def check(edits, length):
        shard.write_bytes(edited(content, edits, length))
        reader = ShardReader(DataFolder(folder), metadata, "train", verify=False)
        try:
            with alarm(PATIENCE_SECONDS):
                tables = [reader.read(piece) for piece in reader.pieces]
        except InputError as error:
            one_line(error, shard)
        else:
            assert sum(len(table) for table in tables) == metadata.splits["train"].cells

    check()


@COUNTS
def test_metadata_is_refused_or_read(examples, tiny):
    content = (tiny.processed / "metadata.json").read_bytes()

    @bounded(examples)
    @given(EDITS, LENGTHS)
    def check(edits, length):
        text = edited(content, edits, length).decode("utf-8", "replace")
        try:
            assert isinstance(parse_metadata(text, "metadata.json"), Metadata)
        except InputError as error:
            assert "metadata.json" in str(error)

    check()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
SECTIONS = st.sampled_from([*Config.model_fields, "TransformerLayer_setting", "nonsense"])
KEYS = st.sampled_from(["batch_size", "mode", "d_model", "global_seed", "preprocessing", "enable"])


@COUNTS
def test_settings_are_refused_or_read(examples, tmp_path):
    path = tmp_path / "fuzzed.yaml"

    @bounded(examples)
    @given(st.dictionaries(SECTIONS, st.dictionaries(KEYS, VALUES, max_size=2) | VALUES))
    def structured(document):
        path.write_text(json.dumps(document))
        try:
            assert isinstance(parse_document(read_document(path), str(path)), Config)
        except InputError as error:
            one_line(error, path)

    @bounded(examples)
    @given(
        st.binary(max_size=40) | st.text(alphabet="abc:{}[]&*!-?|>%@` \t\n'\"#,0.~<", max_size=40)
    )
    def raw(content):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        try:
            parse_document(read_document(path), str(path))
        except InputError as error:
            one_line(error, path)

    structured()
    raw()
