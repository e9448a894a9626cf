"""Checks gated and linear attention, alone and in the model: python test_gated_attention.py."""

import subprocess
import sys

from tests.attn_model.report import report


def test_every_claim_holds():
    """Serve `pytest test_gated_attention.py` too."""
    assert subprocess.run([sys.executable, __file__], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(
        report("tests/attn_model/test_gated_attention.py", "tests/attn_model/test_gated_models.py")
    )
