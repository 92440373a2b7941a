# SPDX-License-Identifier: Apache-2.0
"""Publishing a folder in one step, on file systems that can and cannot swap folders."""

import os
import threading

import pytest

from fairlead_venvs._build import publish as publishing
from fairlead_venvs._build.publish import TRASH, discard, publish


def filled(folder, text):
    folder.mkdir()
    (folder / "what").write_text(text)
    return folder


@pytest.fixture(params=["swaps", "cannot swap"])
def file_system(request, monkeypatch):
    """The file system of the tests, and one that cannot swap two folders."""
    if request.param == "cannot swap":
        monkeypatch.setattr(publishing, "RENAME_EXCHANGE", 1 << 20)  # the kernel knows no such flag
    return request.param


def test_free(tmp_path, file_system):
    """A new folder takes a free place, or that of an empty folder."""
    for number in range(2):
        place = tmp_path / f"place-{number}"
        if number:
            place.mkdir()
        assert publish(filled(tmp_path / f"new-{number}", "new"), place, lambda: pytest.fail("asked"))
        assert (place / "what").read_text() == "new"


def test_taken(tmp_path, file_system):
    """A complete folder stays, and the second process keeps its own to discard."""
    place = filled(tmp_path / "place", "first")
    new = filled(tmp_path / "new", "second")
    assert not publish(new, place, lambda: True)
    assert (place / "what").read_text() == "first"
    assert (new / "what").read_text() == "second"


def test_replaced(tmp_path, file_system):
    """A folder, a file or a dangling link that does not stay is replaced."""
    makers = (lambda path: filled(path, "old"), lambda path: path.write_text("old"), lambda path: path.symlink_to("x"))
    for number, make in enumerate(makers):
        place = tmp_path / f"place-{number}"
        make(place)
        new = filled(tmp_path / f"new-{number}", "new")
        assert publish(new, place, lambda: False)
        assert (place / "what").read_text() == "new"
        if os.path.lexists(new):
            discard(new, place)
        assert not os.path.lexists(new)


def test_many(tmp_path, file_system):
    """Several threads replace the same place at once, and one of their folders is there in the end."""
    place = filled(tmp_path / "place", "old")

    def replace(number):
        new = filled(tmp_path / f"new-{number}", str(number))
        assert publish(new, place, lambda: False)

    threads = [threading.Thread(target=replace, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (place / "what").read_text() in set(map(str, range(8)))
    left = [path for path in tmp_path.iterdir() if path != place]
    assert len(left) == 8
    assert all((path / "what").exists() for path in left)
    assert {TRASH in path.name for path in left} == {file_system == "cannot swap"}
