# SPDX-License-Identifier: Apache-2.0
"""Tests of uv.lock: where its files come from, and which requirements it covers."""

import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parent.parent
LOCK = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
MEMBERS = {path.parent.name: tomllib.loads(path.read_text()) for path in ROOT.glob("packages/*/pyproject.toml")}


def find_public_index() -> str:
    """Return the host of the index to which the release workflow publishes."""
    workflow = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    (host,) = re.findall(r"url: https://([^/]+)/project/", workflow)
    return host


def test_sources():
    """Each package is a member of the workspace, or comes from the public index: from no mirror and no local folder."""
    members = [package for package in LOCK if package["source"].keys() != {"registry"}]
    expected = [{"virtual": "."}, *({"editable": f"packages/{name}"} for name in sorted(MEMBERS))]
    assert sorted((package["source"] for package in members), key=str) == sorted(expected, key=str)
    indexes = {package["source"]["registry"] for package in LOCK if package not in members}
    assert indexes == {f"https://{find_public_index()}/simple"}


def test_files():
    """Each file has a URL with https, all of them on one public host, and a hash."""
    files = [file for package in LOCK for file in (*package.get("wheels", []), *filter(None, [package.get("sdist")]))]
    addresses = {(urlsplit(file["url"]).scheme, urlsplit(file["url"]).netloc) for file in files}
    ((scheme, host),) = addresses
    assert scheme == "https"
    assert re.fullmatch(r"[a-z]+(\.[a-z]+)+", host), host
    assert [file for file in files if not file["hash"].startswith("sha256:")] == []


def test_development_group():
    """`uv sync` installs every package and what the tests of each need, but not torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(project["dependencies"]) == sorted(f"fairlead-{name}" for name in MEMBERS)
    names = {one for one in (*GROUPS["dev"], *GROUPS["test"]) if isinstance(one, str)}
    runtime = {re.split(r"[^\w-]", one)[0] for member in MEMBERS.values() for one in member["project"]["dependencies"]}
    tests = {re.split(r"[^\w-]", one)[0] for member in MEMBERS.values() for one in member["dependency-groups"]["test"]}
    assert {one for one in tests if not one.startswith("fairlead-")} - names - runtime == set()
    assert "torch" not in names
