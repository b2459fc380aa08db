"""What becomes of errors of every class: an error of ours, a value, or the sign to undo something.

Owns: the places that catch whatever is raised. Who runs code of the user's, of a library or of another process, and
must not break with it, calls one of these. Does not own: what follows from an error.
"""

from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def in_words(error: BaseException) -> str:
    """Example: "ValueError: not a number"."""
    return f"{type(error).__name__}: {error}"


@contextmanager
def raised_as(kind: type[Exception], begin: str, end: str = "") -> Generator[None]:
    """Raise an error of `kind`, with the words of whatever the block raised between `begin` and `end`. One that is of
    this kind already passes as it is."""
    try:
        yield
    except kind:
        raise
    except Exception as error:
        raise kind(f"{begin}{in_words(error)}{end}") from error


@contextmanager
def undone_by(undo: Callable[[BaseException], object]) -> Generator[None]:
    """Call `undo` with whatever ends the block early, a cancellation too, and let it pass."""
    try:
        yield
    except BaseException as error:
        undo(error)
        raise


def outcome_of(call: Callable[[*Ts], T], *args: *Ts) -> T | Exception:
    """What the call returns, or the error that it raises."""
    try:
        return call(*args)
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return error


async def outcome_when_done(work: Awaitable[T]) -> T | Exception:
    """What is awaited, or its error. A cancellation is raised."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return error


def in_daemon_thread(call: Callable[[*Ts], T], *args: *Ts, name: str | None = None) -> Future[T]:
    """Call it in a thread for which the end of the process does not wait. The result raises whatever it raised."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001 - the future has it
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future
