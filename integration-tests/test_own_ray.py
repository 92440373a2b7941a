# SPDX-License-Identifier: Apache-2.0
"""Tests that the checks and the examples use a Ray of their own, whatever else runs on the machine."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if "init_ray(" in path.read_text()]
# These start no Ray.
PURE = ("test_documented.py", "test_planning.py", "project / 'tests'", "SHARDING_UNDER_TEST")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples(example):
    """An example starts a Ray of its own, and joins another only if RAY_ADDRESS or an argument names it."""
    source = example.read_text()
    addresses = re.findall(r"init_ray\((.*?)[,)]", source)
    defaults = re.findall(r'"--address", default=(\w+)', source)
    if defaults:
        assert (set(addresses), defaults) == ({"address=options.address"}, ["own"])
        assert 'own = os.environ.get("RAY_ADDRESS") or "local"' in source
    else:
        assert addresses == ['address="local"']


def test_sessions():
    """Each session of the noxfile that runs tests, examples, benchmarks or pictures on Ray sets RAY_ADDRESS."""
    source = (ROOT / "noxfile.py").read_text()
    assert re.search(r'^RAY_ENV = .*"RAY_ADDRESS": "local"', source, re.MULTILINE)
    spread = re.findall(r"^ *(\w+) = \{\*\*(?:RAY_ENV|TEST_ENV)\b", source, re.MULTILINE)
    named = re.compile(rf"env=(?:\{{\*\*)?(?:{'|'.join(['RAY_ENV', *spread])})\b")
    calls = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    uses = [call for call in calls if re.match(r"session\.run\(.*'(pytest'|examples/|benchmarks/|docs/draw)", call)]
    assert len(uses) > 20
    assert [call for call in uses if not named.search(call) and not any(pure in call for pure in PURE)] == []
