"""The pages on the network: their tables are the code's, their settings the configuration's."""

import re
from pathlib import Path

import pytest

from alphastomics.config import LayerConfig
from tests.attn_model.tables import attention_table, mixture_table

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "table"), [("gated-attention.md", attention_table), ("moe.md", mixture_table)]
)
def test_the_table_of_parameter_counts_is_the_one_the_code_makes(page, table):
    assert table() in (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["gated-attention.md", "moe.md"])
def test_every_setting_named_with_a_default_has_that_default(page):
    rows = re.findall(r"^\| `(\w+)` \| `(\S+)` \|", (DOCS / page).read_text(encoding="utf-8"), re.M)
    # The page speaks of the file's keys, of which two are one setting inside.
    inner = {"gate_type": "gate"}
    defaults = {name: str(value).lower() for name, value in LayerConfig().model_dump().items()}
    defaults["use_gated_attention"] = str(LayerConfig().attention == "softmax").lower()
    assert rows
    for name, value in rows:
        assert defaults[inner.get(name, name)] == value.lower(), name
