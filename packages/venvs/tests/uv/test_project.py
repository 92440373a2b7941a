# SPDX-License-Identifier: Apache-2.0
"""Files of a project that cannot be read."""

import re

import pytest

from fairlead_venvs import VenvSpec


@pytest.mark.parametrize("name", ["pyproject.toml", "uv.lock", "uv.toml"])
@pytest.mark.parametrize("content", [b"source = {", b"\xff"])
def test_files_that_cannot_be_read(name, content, make_project):
    """The error names the file of a project that is not TOML."""
    folder = make_project()
    (folder / name).write_bytes(b'source = { editable = "../other" }\n' + content)
    with pytest.raises(ValueError, match=rf"{re.escape(str(folder / name))} cannot be read: "):
        VenvSpec(project=folder).fingerprint()
