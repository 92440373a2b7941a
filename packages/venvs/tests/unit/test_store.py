# SPDX-License-Identifier: Apache-2.0
"""The folder of all environments."""

import os
import re
from pathlib import Path

import pytest

from fairlead_venvs import create_local_venv
from fairlead_venvs._build.permissions import open_trusted
from fairlead_venvs._build.store import FACTS, MANIFEST, python_of, read_manifest, write_facts, write_manifest
from fairlead_venvs._planning import requirements


def test_folder_with_a_comma(spec_of, tmp_path, monkeypatch):
    """A folder with a comma, which uv reads as the end of its name, is refused before anything is built."""
    monkeypatch.setenv("FAIRLEAD_VENV_DIR", str(tmp_path / "one,two"))
    with pytest.raises(ValueError, match=r"FAIRLEAD_VENV_DIR is .*one,two.*Choose another folder"):
        create_local_venv(spec_of("alpha"))
    assert not (tmp_path / "one,two").exists()


@pytest.fixture
def manifest(root):
    """The manifest of an environment."""
    folder = root / "venv-0123456789ab"
    python = Path(python_of(folder))
    python.parent.mkdir(parents=True)
    python.touch()
    write_manifest(folder, root, dict.fromkeys(FACTS, "mine"))
    return folder / MANIFEST


@pytest.fixture
def pins(root):
    """A stored resolution."""
    path = root / ".resolved" / "0123"
    path.parent.mkdir(parents=True)
    write_facts(path, {"pins": ["mine==1"], "direct": {}})
    return path


@pytest.fixture
def replace_after_check(monkeypatch):
    """Return a function that has a file replaced by another user's as soon as the owner and mode of it are known."""

    def prepare(path, content):
        theirs = path.with_name("theirs")
        theirs.write_text(content)
        theirs.chmod(0o666)
        checked = path.stat().st_ino

        def look(function):
            def after(*arguments, **options):
                seen = function(*arguments, **options)
                if seen.st_ino == checked and theirs.exists():
                    theirs.rename(path)
                return seen

            return after

        for name in ("fstat", "lstat"):
            monkeypatch.setattr(os, name, look(getattr(os, name)))
        return theirs

    return prepare


def test_a_manifest_that_is_replaced_after_its_check(manifest, replace_after_check):
    """The manifest whose owner and mode were checked is read, and the file of another user is refused."""
    theirs = replace_after_check(manifest, manifest.read_text().replace("mine", "theirs"))
    assert read_manifest(manifest.parent)["description"] == "mine"
    assert not theirs.exists()
    assert read_manifest(manifest.parent) is None


def test_pins_that_are_replaced_after_their_check(root, pins, replace_after_check):
    """The pins whose owner and mode were checked are read, and the file of another user is refused."""
    theirs = replace_after_check(pins, pins.read_text().replace("mine", "theirs"))
    assert requirements._read(pins, root).pins == ("mine==1",)
    assert not theirs.exists()
    assert requirements._read(pins, root) is None


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_manifest_that_is_no_file(manifest, kind):
    """A pipe, a link or a folder in the place of a manifest is no manifest, and nothing waits for it."""
    moved = manifest.rename(manifest.with_name("moved"))
    if kind == "pipe":
        os.mkfifo(manifest)
    elif kind == "link":
        manifest.symlink_to(moved)
    else:
        manifest.mkdir()
    assert read_manifest(manifest.parent) is None


def test_the_error_of_a_path_names_all_of_it(root, manifest):
    """The error of a file that cannot be opened has its whole path."""
    manifest.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(manifest))):
        open_trusted(root, manifest, os.O_RDONLY)
