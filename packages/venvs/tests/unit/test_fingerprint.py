# SPDX-License-Identifier: Apache-2.0
"""The fields and requirements that change the fingerprint of an environment, and those that do not."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_venvs import VenvSpec
from fairlead_venvs._planning.plan import read_draft
from fairlead_venvs._planning.requirements import Resolution

# Another version than that of the tests.
OTHER_PYTHON = "3.12" if sys.version_info[:2] != (3, 12) else "3.13"


def fingerprint(spec, *pins):
    """The fingerprint of a spec whose requirements were resolved to some versions."""
    return read_draft(spec).complete(Resolution(pins)).recipe.fingerprint


def test_fields_of_requirements(wheels, tools, tmp_path):
    """The same holds for requirements and for links."""
    ray = "ray[data,default]==2.60; python_version > '3'"
    same = [
        VenvSpec(requirements=["NumPy >= 2", "ray[default,data] == 2.60 ; python_version > '3'"]),
        VenvSpec(requirements=[ray, "numpy>=2", "numpy>=2"]),
        VenvSpec(requirements=["numpy>=2", ray], env={"UV_LINK_MODE": "copy", "UV_INDEX_X_PASSWORD": "x"}),
        VenvSpec(requirements=["numpy>=2", ray], env={"UV_OFFLINE": "1"}),
    ]
    assert len({fingerprint(spec) for spec in same}) == 1
    assert fingerprint(same[0]) != fingerprint(same[0], "numpy==2.0") != fingerprint(same[0], "numpy==2.1")
    tools.make_wheel(tmp_path, "delta")
    others = [
        VenvSpec(requirements=[]),
        VenvSpec(requirements=["numpy"]),
        VenvSpec(requirements=["numpy>=2"]),
        VenvSpec(requirements=["numpy>=2"], python=OTHER_PYTHON),
        VenvSpec(requirements=["numpy>=2"], index="https://one/simple"),
        VenvSpec(requirements=["numpy>=2"], index="https://two/simple"),
        VenvSpec(requirements=["numpy>=2"], no_index=True),
        VenvSpec(requirements=["numpy>=2"], find_links=[str(wheels)]),
        VenvSpec(requirements=["numpy>=2"], find_links=[str(tmp_path)]),
    ]
    prints = [fingerprint(spec) for spec in others]
    assert len(set(prints)) == len(others)
    tools.make_wheel(tmp_path, "delta", files={"delta.py": ""})
    assert fingerprint(others[-1]) not in prints
    # A folder is a folder, also as a URL.
    as_url = VenvSpec(requirements=["numpy>=2"], find_links=[tmp_path.as_uri()])
    assert as_url == others[-1]
    assert fingerprint(as_url) == fingerprint(others[-1])
    with pytest.raises(ValueError, match="names a file of another host"):
        VenvSpec(requirements=[], find_links=["file://host/wheels"])


WORDS = st.lists(st.sampled_from(["numpy", "Ray", "idna>=3", "six ; sys_platform == 'linux'"]), max_size=6)


@settings(max_examples=50, deadline=None, database=None)
@given(first=WORDS, second=WORDS)
def test_equal_exactly_if_the_same(first, second):
    """Two lists with the same resolution have one fingerprint exactly if they have the same requirements."""
    same = {one.lower() for one in first} == {one.lower() for one in second}
    prints = [fingerprint(VenvSpec(requirements=one), "numpy==2.0") for one in (first, second)]
    assert (prints[0] == prints[1]) == same
