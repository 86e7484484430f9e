"""A display on a terminal that queries the broker each second, until the user quits."""

import os
import select
import signal
import sys
import termios
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
        _signalled() as signalled,
        _keys(signalled) as pressed,
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


@contextmanager
def _signalled() -> Iterator[int]:
    """Yield a descriptor that can be read once a signal has come that would end the program; it does after the block.

    The handler raises nothing: that would be ignored where Python happens to run a finalizer.
    """
    reader, writer = os.pipe()
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            os.write(writer, b"\0")

    numbers = [each for each in _ENDING if signal.getsignal(each) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, note)
    try:
        yield reader
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        os.close(reader)
        os.close(writer)
        if received:
            os.kill(os.getpid(), received[0])


@contextmanager
def _keys(signalled: int) -> Iterator[Callable[[], str]]:
    """Yield a function that waits for `PAUSE` seconds, a key, or until the descriptor can be read; it returns the key,
    "" or `_END`."""
    terminals = [sys.stdin.fileno()] if sys.stdin.isatty() else []

    def pressed() -> str:
        ready, _, _ = select.select([signalled, *terminals], [], [], PAUSE)
        if not ready:
            return ""
        if signalled in ready:
            return _END
        try:
            return os.read(ready[0], 1).decode("ascii", "replace") or _END
        except OSError:  # the terminal has gone
            return _END

    before = [(each, termios.tcgetattr(each)) for each in terminals]
    try:
        for each in terminals:
            tty.setcbreak(each)
        yield pressed
    finally:
        for each, attributes in before:
            with suppress(termios.error):  # the terminal has gone
                termios.tcsetattr(each, termios.TCSADRAIN, attributes)
