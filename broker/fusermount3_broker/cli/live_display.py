"""A display on a terminal that queries the broker each second, until the user quits."""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fusermount3_broker.cli.control_client import NotRunning
from fusermount3_broker.messages.untrusted_text import visible

#: Seconds between two queries.
PAUSE = 1.0

#: What stands for a key when no more can come, and what ends the display.
_END = "end"
_QUITS = ("q", _END)
#: Signals that end the program, once the terminal is as it was before.
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

SampleT = TypeVar("SampleT")
#: Draws a sample; the one before it, if there is one; in at most so many lines.
Draw = Callable[[SampleT, SampleT | None, int], RenderableType]


def show(ask: Callable[[], SampleT], draw: Draw[SampleT], console: Console) -> None:
    """Show what `ask` returns, each second, until q, ^C or the end of the input. If the broker is away, wait for it.

    A signal that ends the program does so after the terminal has been restored.

    Raises NotRunning if it does not answer the first query.
    """
    sample, before, problem = ask(), None, ""
    with (
        suppress(KeyboardInterrupt),
        _unwound(),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as screen,
    ):
        while True:
            shown = draw(sample, before, console.size.height - bool(problem))
            screen.update(Group(Text(visible(problem), style="bold red"), shown) if problem else shown, refresh=True)
            if pressed() in _QUITS:
                return
            try:
                sample, before, problem = ask(), sample, ""
            except NotRunning as error:
                problem = str(error)


class _Ended(BaseException):
    """A signal is to end the program."""


@contextmanager
def _unwound() -> Iterator[None]:
    """Leave the block before one of the signals ends the program that would end it at once."""
    received: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # another signal doesn't interrupt what restores the terminal
            raise _Ended

    numbers = [each for each in _ENDING if signal.getsignal(each) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        with suppress(_Ended):
            yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
    if received:
        os.kill(os.getpid(), received[0])


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Yield a function that waits for `PAUSE` seconds, or a key; it returns the key, "" or `_END`."""
    if not sys.stdin.isatty():
        yield _pause
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> str:
        ready, _, _ = select.select([descriptor], [], [], PAUSE)
        if not ready:
            return ""
        try:
            return os.read(descriptor, 1).decode("ascii", "replace") or _END
        except OSError:  # the terminal has gone
            return _END

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _pause() -> str:
    time.sleep(PAUSE)
    return ""
