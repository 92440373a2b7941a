# SPDX-License-Identifier: Apache-2.0
"""What `top` draws again and again, and the keys that change it; what is looked at is made up."""

import contextlib
import os
import pty
import re
import select
import sys
import termios
import threading
from types import SimpleNamespace

import pytest
from rich.text import Text

from fairlead_inspect import _command, _live
from fairlead_inspect._command import main
from fairlead_inspect._live import show_live
from fairlead_inspect._model import Job, Snapshot
from fairlead_placement import HeadTimeoutError
from fairlead_placement.spi import Output

SEEN = Snapshot(0.0, (Job("01000000", "train.py"),), (), (), ())


def test_silent_head(monkeypatch, capsys):
    """`top` shows the latest table, since when it is old, and why, until the head answers (seams: looks and clock)."""
    silent = HeadTimeoutError("no answer")
    looks, times = iter([silent, SEEN, silent, SEEN]), iter(["10:00:00", "10:00:09"])

    def look(options, **_):
        if (one := next(looks)) is silent:
            raise silent
        return one

    monkeypatch.setattr(_command, "_look", look)
    monkeypatch.setattr(_command, "find_groups_source", lambda: None)
    monkeypatch.setattr(_command, "attach", lambda address, **_: contextlib.nullcontext())
    monkeypatch.setattr(_live, "time", SimpleNamespace(strftime=lambda _: next(times), sleep=lambda _: None))
    assert main(["top"]) == 3  # there is nothing to show yet
    assert capsys.readouterr() == ("", "no answer `why --here` looks at one machine without it.\n")
    assert main(["top", "-n", "3"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"10:00:0\d|Not refreshed .*", shown) == [
        "10:00:00",
        "10:00:00",
        "Not refreshed since then: no answer",
        "10:00:09",
    ]


@contextlib.contextmanager
def on_terminal(monkeypatch):
    """Give this process a terminal; gives what a person sees and types at, and the terminal itself."""
    ours, theirs = pty.openpty()
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "100"), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    with open(theirs, "w") as file, os.fdopen(os.dup(theirs)) as keys, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "stdin", keys)
        yield ours, theirs
    os.close(ours)


def type_and_read(person, typed):
    """Type each key, and read until what must follow is shown; type q if it does not come."""
    for key, then in typed:
        os.write(person, key)
        shown = ""
        while then not in shown and select.select([person], [], [], 60.0)[0]:
            shown += os.read(person, 65536).decode(errors="replace")
        if then not in shown:
            os.write(person, b"q")


def test_keys(monkeypatch):
    """Keys change what is drawn at once, q ends it, and the terminal is as before."""
    looks, views = [], []

    def look(first):
        looks.append(first)
        return lambda view: views.append(view) or Text(f"picture {view.order} {view.stacks} end")

    with on_terminal(monkeypatch) as (person, screen):
        before = termios.tcgetattr(screen)
        typed = ((b"", "s: sort"), (b"s", "picture cpu False"), (b"\n", "picture cpu True"), (b"q", "1049l"))
        typist = threading.Thread(target=type_and_read, args=(person, typed))
        typist.start()
        assert show_live(look, Output(), times=None, interval_s=300.0) == 0
        typist.join(60)
        assert not typist.is_alive()
        assert termios.tcgetattr(screen) == before
    assert looks == [True]
    assert [(one.order, one.stacks) for one in views] == [("fleet", False), ("cpu", False), ("cpu", True)]
    assert (views[0].rows, views[0].on_screen) == (32, True)


def test_no_keys(monkeypatch):
    """Without a standard input it goes on until Ctrl-C, and gives the screen back."""
    looks = []

    def look(first):
        looks.append(first)
        if len(looks) == 3:
            raise KeyboardInterrupt
        return lambda view: Text("picture")

    with on_terminal(monkeypatch) as (person, _):
        monkeypatch.setattr(sys, "stdin", None)
        reader = threading.Thread(target=type_and_read, args=(person, ((b"", "1049l"),)))
        reader.start()
        with pytest.raises(KeyboardInterrupt):
            show_live(look, Output(), times=None, interval_s=0.0)
        reader.join(60)
        assert not reader.is_alive()
    assert looks == [True, False, False]
