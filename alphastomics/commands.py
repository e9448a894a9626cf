"""What each command does: a `Call` enters, the text for stdout leaves.

Every import of a room stands inside the command that needs it, so that the door opens at once.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from alphastomics.cli import Call
from alphastomics.cli_flags import DEMO_DIR
from alphastomics.errors import InputError

logger = logging.getLogger(__name__)


def simulate(call: Call) -> str:
    """Write a synthetic tissue; print its files."""
    from alphastomics.simulate import write_tissue

    paths = write_tissue(
        call.config.simulation,
        call.config.seed.global_seed,
        call.arguments.output_dir,
        overwrite=call.arguments.overwrite,
    )
    return "\n".join(str(path) for path in paths)


def demo(call: Call) -> str:
    """Do the main job on a synthetic tissue; print where the results are."""
    from alphastomics.demo import run_demo

    folder = call.arguments.output_dir or Path(DEMO_DIR)
    return json.dumps(run_demo(folder, call.config.seed.global_seed), indent=2)


def config(_call: Call) -> str:
    """Print the commented default settings."""
    from alphastomics.config_file import commented_yaml

    return commented_yaml()


def not_yet(call: Call) -> str:
    """Say that a documented command's work is not in this version."""
    ready = ", ".join(name for name, runner in RUNNERS.items() if runner is not not_yet)
    raise InputError(f"{call.command}: not in this version yet; it can {ready}")


RUNNERS: dict[str, Callable[[Call], str | None]] = {
    "preprocess": not_yet,
    "stage1": not_yet,
    "stage2": not_yet,
    "train": not_yet,
    "test": not_yet,
    "sample": not_yet,
    "extract": not_yet,
    "upload": not_yet,
    "simulate": simulate,
    "demo": demo,
    "config": config,
}
