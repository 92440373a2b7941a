# SPDX-License-Identifier: Apache-2.0
"""The folder of all environments."""

import pytest

from fairlead_venvs import create_local_venv


def test_folder_with_a_comma(spec_of, tmp_path, monkeypatch):
    """A folder with a comma, which uv reads as the end of its name, is refused before anything is built."""
    monkeypatch.setenv("FAIRLEAD_VENV_DIR", str(tmp_path / "one,two"))
    with pytest.raises(ValueError, match=r"FAIRLEAD_VENV_DIR is .*one,two.*Choose another folder"):
        create_local_venv(spec_of("alpha"))
    assert not (tmp_path / "one,two").exists()
