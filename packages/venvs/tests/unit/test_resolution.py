# SPDX-License-Identifier: Apache-2.0
"""The settings that a resolution depends on, and the lines that uv writes."""

import pytest

from fairlead_venvs import VenvBuildError, VenvSpec
from fairlead_venvs._planning.requirements import Resolution, installed_lines, parse_resolution
from fairlead_venvs._planning.settings import read_settings


def test_settings_that_do_not_count(tmp_path):
    """Settings that only affect how something is installed do not count, nor do variables that the spec replaces."""
    spec = VenvSpec(
        requirements=["alpha"], index="https://h/simple", find_links=[str(tmp_path)], env={"UV_RESOLUTION": "x"}
    )
    how = {"UV_CONCURRENT_BUILDS": "1", "UV_CACHE_DIR": "/c", "UV_PYTHON_DOWNLOADS": "never", "SSL_CERT_FILE": "/f"}
    replaced = {
        "UV_FIND_LINKS": "/l",
        "UV_INDEX_URL": "https://o/simple",
        "UV_RESOLUTION": "lowest",
        "UV_PRERELEASE": "",
    }
    opens = {"UV_INDEX_MINE_USERNAME": "me", "UV_INDEX_MINE_PASSWORD": "mellon"}
    plain, changed = read_settings(spec, {}), read_settings(spec, {**how, **replaced, **opens})
    assert changed.counted == plain.counted == {"UV_RESOLUTION": "x"}
    # Credentials are sent with their index.
    assert changed.env == {"UV_DEFAULT_INDEX": "https://h/simple", "UV_RESOLUTION": "x", **opens}
    assert "mellon" in changed.secrets
    one, other = (read_settings(spec, {"UV_INDEX": f"https://me:{word}@h/s"}) for word in ("mellon", "opensesame"))
    assert one.counted == other.counted == {"UV_INDEX": "https://***@h/s", "UV_RESOLUTION": "x"}
    assert read_settings(VenvSpec(requirements=[], no_index=True), {"UV_INDEX": "https://h/s"}).env == {}


def test_lines():
    """URLs and wheels of the spec are installed as given, and everything else by version."""
    given = [
        "alpha[x] @ https://h/a.zip",
        "beta @ https://h/b.zip ; python_version<'3'",
        "/w/Delta-1.0-py3-none-any.whl",
    ]
    staged = [*given[:2], "./wheels/0/Delta-1.0-py3-none-any.whl"]
    text = (
        "# by uv\n--index-url https://h\nalpha @ https://h/a.zip\n./wheels/0/Delta-1.0-py3-none-any.whl\ngamma==1.0\n\n"
    )
    found = parse_resolution(text, given)
    assert found == Resolution(("gamma==1.0",), {"alpha": "", "delta": ""})
    assert installed_lines(given, staged, found) == (staged[0], staged[2], "gamma==1.0")
    # The URL of a dependency is kept, unless it has a credential.
    git = "epsilon @ git+ssh://git@h/e@0123456789012345678901234567890123456789"
    assert parse_resolution(git, given).pins == (git,)
    with pytest.raises(
        VenvBuildError, match=r"URL with a credential, which is not stored: epsilon @ https://\*\*\*@h/e"
    ):
        parse_resolution("epsilon @ https://me:mellon@h/e.zip", given)
