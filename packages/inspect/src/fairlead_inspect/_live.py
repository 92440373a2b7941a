# SPDX-License-Identifier: Apache-2.0
"""A picture that is drawn again and again, on a terminal with keys that change it."""

import contextlib
import itertools
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from fairlead_placement import HeadTimeoutError
from fairlead_placement.spi import Output

from ._show import ORDERS

# Draws what a look has seen.
Picture = Callable[["View"], RenderableType]
_KEYS = "s: sort, now by {order}   enter: {other}   q: quit"
_ORDERS = tuple(ORDERS)
# Of a terminal, the lines that are not for rows.
_OTHER_LINES = 8


@dataclass(frozen=True)
class View:
    """What is shown of a look: so many rows in an order, or the stacks; on a screen each row is one line."""

    rows: int = 40
    order: str = "fleet"
    stacks: bool = False
    on_screen: bool = False


def show_live(look: Callable[[bool], Picture], output: Output, *, times: int | None, interval_s: float) -> int:
    """Draw what `look` sees again and again, and return the exit status.

    Args:
        look: looks, and returns the picture; it is given whether it is the first look.
        output: where to draw. What is not a terminal gets one picture after the other.
        times: how often to draw; None for until Ctrl-C, or the key q.
        interval_s: seconds between two looks.
    """
    console = output.make_console()
    seen = _Seen(look)
    if times is not None or not console.is_terminal:
        for number in itertools.count(1):
            output.print(seen.draw(View()))
            output.flush()
            if number == times:
                break
            time.sleep(interval_s)
            seen.look_again()
        return 0
    view = View(on_screen=True)

    def draw() -> RenderableType:
        keys = _KEYS.format(order=view.order, other="processes" if view.stacks else "stacks")
        picture = seen.draw(replace(view, rows=max(1, console.height - _OTHER_LINES)))
        return Group(picture, Text(keys, style="dim"))

    live = Live(draw(), console=console, screen=True, auto_refresh=False)
    try:
        with _reading_keys() as read_key:
            live.start(refresh=True)
            until = time.monotonic() + interval_s
            while (key := read_key(until - time.monotonic())) != "q":
                if key == "s":
                    view = replace(view, order=_ORDERS[(_ORDERS.index(view.order) + 1) % len(_ORDERS)])
                elif key in ("\r", "\n"):
                    view = replace(view, stacks=not view.stacks)
                elif time.monotonic() >= until:
                    seen.look_again()
                    until = time.monotonic() + interval_s
                live.update(draw(), refresh=True)
    finally:
        live.stop()  # also after Ctrl-C in the middle of the first picture
    return 0


class _Seen:
    """The latest look, which stays while Ray's head does not answer."""

    def __init__(self, look: Callable[[bool], Picture]) -> None:
        self._look, self._note = look, ""
        self._picture, self._at = look(True), time.strftime("%H:%M:%S")

    def look_again(self) -> None:
        try:
            self._picture, self._at, self._note = self._look(False), time.strftime("%H:%M:%S"), ""
        except HeadTimeoutError as error:
            self._note = f"Not refreshed since then: {error}"

    def draw(self, view: View) -> RenderableType:
        note = [Text(self._note, style="bold red")] if self._note else []
        return Group(Text(self._at, style="dim"), self._picture(view), *note)


@contextlib.contextmanager
def _reading_keys() -> Iterator[Callable[[float], str]]:
    """Give a function that waits for a key for so many seconds; without a terminal none ever comes."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield _wait
        return
    terminal = sys.stdin.fileno()

    def read_key(within_s: float) -> str:
        ready, _, _ = select.select([terminal], [], [], max(0.0, within_s))
        try:
            return os.read(terminal, 1).decode(errors="replace") or "q" if ready else ""
        except OSError:
            return "q"  # the terminal has been closed

    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield read_key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _wait(within_s: float) -> str:
    time.sleep(max(0.0, within_s))
    return ""
