# SPDX-License-Identifier: Apache-2.0
"""The sessions of `ci` share what Python has compiled: see scripts/bytecode.py."""

import base64
import hashlib
import os
import py_compile
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BYTECODE = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "bytecode.py"))
SOURCE = "import sys\nfile = sys._getframe().f_code.co_filename\n"


def install(packages, source, mtime):
    """Install a package with one module, and return the path of the module."""
    info = packages / "one-1.0.dist-info"
    info.mkdir(parents=True)
    module = packages / "one.py"
    module.write_text(source)
    os.utime(module, (mtime, mtime))
    digest = base64.urlsafe_b64encode(hashlib.sha256(source.encode()).digest()).rstrip(b"=").decode()
    rows = [f"one.py,sha256={digest},{len(source)}", "one-1.0.dist-info/RECORD,,", "../../bin/one,sha256=00,1"]
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    return module


def list_compiled(packages):
    return sorted(path.name for path in packages.rglob("*.pyc"))


@pytest.fixture
def store(tmp_path):
    """Return a store with the bytecode of the module."""
    packages = tmp_path / "first"
    py_compile.compile(str(install(packages, SOURCE, 1_600_000_000)))
    BYTECODE["keep"](packages, tmp_path / "store")
    return tmp_path / "store"


def test_shared(store, tmp_path):
    """Python uses the bytecode of another environment as its own, whatever the time of the module."""
    packages = tmp_path / "second"
    module = install(packages, SOURCE, 1_700_000_000)
    BYTECODE["fetch"](packages, store)
    (compiled,) = packages.rglob("*.pyc")
    command = [sys.executable, "-v", "-c", "import one; print(one.file)"]
    env = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert f"{compiled} matches {module}" in done.stderr
    assert done.stdout.strip() == str(module)


def test_another_module(store, tmp_path):
    """A module with another text gets nothing, and bytecode that is there stays."""
    packages = tmp_path / "other"
    install(packages, SOURCE + "more = 1\n", 1_700_000_000)
    BYTECODE["fetch"](packages, store)
    assert list_compiled(packages) == []
    packages = tmp_path / "compiled"
    compiled = Path(py_compile.compile(str(install(packages, SOURCE, 1_700_000_000))))
    before = compiled.stat()
    BYTECODE["fetch"](packages, store)
    assert compiled.stat() == before
    assert list_compiled(packages) == [compiled.name]
