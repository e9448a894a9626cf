"""Entry point: a command line enters; results go to stdout, words to stderr, and a status leaves.

Status 0: done. 2: a mistake of the caller's, said in one line. 1: anything else. 130 and 143:
interrupted by Ctrl-C, or asked to stop.
"""

import errno
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from alphastomics.cli.parse import Call, parse_arguments
from alphastomics.errors import InputError, printable, redacted
from alphastomics.io.threads import wait_briefly

DONE, FAILED, MISTAKE, INTERRUPTED, STOPPED = 0, 1, 2, 130, 143
STDOUT, STDERR = 1, 2
DEBUG_VARIABLE = "ALPHASTOMICS_DEBUG"
# A full disk, a quota, a read-only file system: the caller's to mend, not ours.
ERRNO_OF_CALLER = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EFBIG,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}
OS_ERRORS_OF_CALLER = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)

NO_MEMORY = (
    "not enough memory for this: ask for fewer or smaller things (cells, genes, --batch_size, "
    "model.d_model), or use a larger machine"
)
# How torch says it, on a CPU and on a GPU, and the loader of libraries; this file knows no torch.
OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUDA out of memory", "failed to map segment")
# Launchers set them; our libraries take them for numbers when they are imported.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    fill_standard_streams()
    return answer(lambda: run(parse_arguments(argv)), verbose="--verbose" in argv)


def answer(act: Callable[[], str | None], *, verbose: bool = False) -> int:
    """Do what a user asked for; print what it returns, or what went wrong; return the status.

    What the act imports is imported here and not before: --help answers at once.
    """
    wait_briefly()
    verbose = verbose or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    configure_logging(verbose=verbose)
    try:
        stop_cleanly_on_sigterm()
        result = act()
        if result:
            sys.stdout.write(writable(result.rstrip("\n") + "\n"))
            sys.stdout.flush()
    except KeyboardInterrupt:
        return say("interrupted; the same command goes on from here where it can", INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout went away (`| head`): nothing is left to say, and nobody to hear it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except InputError as error:
        return say(str(error), MISTAKE, show_traceback=verbose)
    except OSError as error:
        if isinstance(error, OS_ERRORS_OF_CALLER) or error.errno in ERRNO_OF_CALLER:
            where = f"{error.filename}: " if error.filename else ""
            return say(f"{where}{error.strerror or error}", MISTAKE, show_traceback=verbose)
        return say(f"{type(error).__name__}: {error}", FAILED, show_traceback=True)
    except MemoryError as error:
        return say(f"{NO_MEMORY} ({error})", MISTAKE, show_traceback=verbose)
    except Exception as error:  # noqa: BLE001 - the entry point: whatever comes becomes a status
        if any(words in str(error) for words in OUT_OF_MEMORY):
            return say(f"{NO_MEMORY} ({error})", MISTAKE, show_traceback=verbose)
        return say(f"{type(error).__name__}: {error}", FAILED, show_traceback=True)
    return DONE


def run(call: Call) -> str | None:
    """Import the command's code, and nothing else's, and run it."""
    require_sound_surroundings()
    from alphastomics.cli.commands import RUNNERS

    return RUNNERS[call.command](call)


def require_sound_surroundings() -> None:
    """Refuse what libraries would stumble over while they are imported."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise InputError("the working folder was deleted: change to another one") from error
    for name in LAUNCHER_VARIABLES:
        value = os.environ.get(name, "0")
        if not value.isdecimal():
            raise InputError(
                f"the environment variable {name} is {value!r}, where a launcher (torchrun, SLURM) "
                "sets a whole number: unset it"
            )


def fill_standard_streams() -> None:
    """Open what was closed (`>&-`): the next file would get its number, and take others' words."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)  # noqa: FBT003 (it takes no other)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(STDOUT, "w")
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w")


def say(message: str, status: int, *, show_traceback: bool = False) -> int:
    """Print one line to stderr, after the traceback if that is wanted."""
    if show_traceback:
        sys.stderr.write(redacted(traceback.format_exc()))
    sys.stderr.write(f"alphastomics: {printable(redacted(' '.join(message.split())))}\n")
    return status


def writable(text: str) -> str:
    """Spell out letters that stdout has no bytes for, as in a file's name that is no UTF-8."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class OneLine(logging.Formatter):
    """Log lines in which every letter stands for itself."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Lay out a record."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """Take tokens out of the whole text, a traceback's too."""
        return redacted(super().format(record))


def configure_logging(*, verbose: bool) -> None:
    """Log to stderr: our own words, and others' from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("alphastomics").setLevel(logging.DEBUG if verbose else logging.INFO)
    # Other packages' deprecation notes are for developers, not for users of the command line.
    logging.captureWarnings(capture=True)
    # Lightning 2.6 meets torch 2.13: even who has warnings raised (PYTHONWARNINGS) can train.
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
    logging.getLogger("py.warnings").setLevel(logging.WARNING if verbose else logging.ERROR)


def stop_cleanly_on_sigterm() -> None:
    """Convert SIGTERM into an exit, so that temporary files are removed on the way out."""

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(STOPPED)

    signal.signal(signal.SIGTERM, leave)


def entry() -> NoReturn:
    """Serve as the console command."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
