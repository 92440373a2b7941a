# SPDX-License-Identifier: Apache-2.0
"""The conversion to the meshes of torch, without torch."""

import builtins
import sys

import pytest

from fairlead_sharding import NamedSharding


def test_missing_torch(monkeypatch):
    """Without torch the error names the method and the command to install it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    # Python refuses to import a module that is None in sys.modules.
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(ImportError, match=r"to_\w+\(\) needs torch, .*: pip install torch") as caught:
        NamedSharding([[3, 1], [2, 0]], ["dp", "tp"]).to_device_mesh("cpu")
    assert caught.value.name == "torch"
    assert isinstance(caught.value.__cause__, builtins.ImportError)
