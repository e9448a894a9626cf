"""The door: a command line enters; results go to stdout, words to stderr, and a status leaves.

Status 0: done. 2: a mistake of the caller's, told in one line. 1: anything else. 130 and 143:
interrupted by Ctrl-C, or asked to stop.
"""

import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from alphastomics.cli import Call, parse_arguments
from alphastomics.errors import InputError

DONE, FAILED, MISTAKE, INTERRUPTED, STOPPED = 0, 1, 2, 130, 143
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return answer(lambda: run(parse_arguments(argv)), verbose="--verbose" in argv)


def answer(act: Callable[[], str | None], *, verbose: bool = False) -> int:
    """Do what a user asked for; print what it returns, or what went wrong; return the status.

    What the act imports is imported here and not before: --help answers at once.
    """
    # Threads that wait by spinning take the cores from whoever has work: on a busy machine a step
    # took twenty times as long. Must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    verbose = verbose or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    configure_logging(verbose=verbose)
    try:
        stop_cleanly_on_sigterm()
        result = act()
        if result:
            sys.stdout.write(result.rstrip("\n") + "\n")
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
    except Exception as error:  # noqa: BLE001 - the door: whatever comes becomes a status
        return say(f"{type(error).__name__}: {error}", FAILED, show_traceback=True)
    return DONE


def run(call: Call) -> str | None:
    """Import the command's code, and nothing else's, and run it."""
    from alphastomics.commands import RUNNERS

    return RUNNERS[call.command](call)


def say(message: str, status: int, *, show_traceback: bool = False) -> int:
    """Print one line to stderr, after the traceback if that is wanted."""
    if show_traceback:
        traceback.print_exc()
    line = " ".join(message.split())
    sys.stderr.write(f"alphastomics: {line}\n")
    return status


def configure_logging(*, verbose: bool) -> None:
    """Log to stderr: our own words, and others' from warnings on."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.getLogger("alphastomics").setLevel(logging.DEBUG if verbose else logging.INFO)
    # Other packages' deprecation notes are for developers, not for users of the command line.
    logging.captureWarnings(capture=True)
    logging.getLogger("py.warnings").setLevel(logging.WARNING if verbose else logging.ERROR)


def stop_cleanly_on_sigterm() -> None:
    """Turn SIGTERM into an exit, so that temporary files are removed on the way out."""

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(STOPPED)

    signal.signal(signal.SIGTERM, leave)


def entry() -> NoReturn:
    """Serve as the console command."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
