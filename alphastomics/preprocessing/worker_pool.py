"""Independent work, side by side: a function and its arguments enter, results leave in order.

Every task writes its own files and nothing else, so the result is the same for any number of
workers. Local workers are fresh processes; with a scheduler address, a Dask cluster's.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, TypeVar

from alphastomics.errors import InputError

CONNECT_SECONDS = 30

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerEnded(MemoryError):
    """A worker was killed, as the operating system does when memory runs out.

    No InputError, for which unfinished work would be removed: the same command goes on with it.
    """


class WorkerPool:
    """Those who do the work of a command: this process, local processes, or a Dask cluster.

    Parameters
    ----------
    workers
        Local processes; 1 works in this one.
    scheduler
        Address of a Dask scheduler whose workers see the same files, or None.
    """

    def __init__(self, workers: int, scheduler: str | None) -> None:
        self.workers, self.scheduler = workers, scheduler
        self._executor: Executor | None = None
        self._opened = ExitStack()

    def __enter__(self) -> "WorkerPool":
        if self.scheduler is not None:
            client = self._opened.enter_context(_dask_client(self.scheduler))
            # pure=False: a task is done for its files, so a remembered result would be no use.
            self._executor = self._opened.enter_context(client.get_executor(pure=False))
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def run(
        self,
        act: Callable[[Item], Result],
        tasks: Sequence[Item],
        finished: Callable[[Item], object],
    ) -> list[Result]:
        """Apply `act` to every task and return the results in the order of the tasks.

        Parameters
        ----------
        act
            A function at the top of its module, so that other processes can import it.
        tasks
            Plain values.
        finished
            Called in this process, in any order, with each task that has been done.
        """
        if self.scheduler is None and (self.workers == 1 or len(tasks) <= 1):
            return [_acted(act, task, finished) for task in tasks]
        if self._executor is None:
            # spawn: a forked child inherits locks held by Arrow's threads, and can wait for ever.
            local = ProcessPoolExecutor(
                self.workers, get_context("spawn"), initializer=_end_with_parent
            )
            self._executor = self._opened.enter_context(local)
        submit = self._executor.submit
        numbers = {submit(act, task): number for number, task in enumerate(tasks)}
        results: dict[int, Result] = {}
        try:
            for future in as_completed(numbers):
                results[numbers[future]] = future.result()
                finished(tasks[numbers[future]])
        except BrokenProcessPool as error:
            raise WorkerEnded(
                "a worker process was ended from outside (out of memory?): try fewer --workers or "
                "a smaller --max_cells_per_file; the same command goes on where this one stopped"
            ) from error
        finally:
            for future in numbers:
                future.cancel()
        return [results[number] for number in range(len(tasks))]


def _acted(act: Callable[[Item], Result], task: Item, finished: Callable[[Item], object]) -> Result:
    result = act(task)
    finished(task)
    return result


def _end_with_parent() -> None:
    """Have a worker end when its parent is killed, which would leave it waiting for ever."""
    parent = parent_process()
    assert parent is not None
    Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _dask_client(address: str) -> Any:
    try:
        import distributed
    except ImportError as error:
        raise InputError(
            "--scheduler needs Dask: pip install 'alphastomics[dask]', or leave the flag out"
        ) from error
    try:
        return distributed.Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--scheduler {address}: no Dask scheduler answers there: check the address, or "
            "leave the flag out to work on this machine"
        ) from error
