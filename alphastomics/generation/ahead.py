"""Work that is begun before its result is needed: a function enters, its result leaves later."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Ahead(Generic[Result]):
    """Runs a function in a thread of its own, which nobody waits for when the program ends."""

    def __init__(self, act: Callable[[], Result]) -> None:
        self.act = act
        self.future: Future[Result] = Future()
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.future.set_result(self.act())
        except BaseException as error:  # noqa: BLE001 - said to whom asks for the result
            self.future.set_exception(error)

    def result(self) -> Result:
        """Wait for the result, or raise what went wrong."""
        return self.future.result()
