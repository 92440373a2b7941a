# SPDX-License-Identifier: Apache-2.0
"""What decides the content of an environment changes its fingerprint, and nothing else does."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_venvs import VenvSpec, create_local_venv
from fairlead_venvs._planning.plan import make_plan, read_request
from fairlead_venvs._planning.resolution import Resolution
from fairlead_venvs._planning.source import source_key

# Another version than that of the tests.
OTHER_PYTHON = "3.12" if sys.version_info[:2] != (3, 12) else "3.13"
MORE = '[project.optional-dependencies]\nx = ["gamma"]\ny = ["beta"]\n[dependency-groups]\ndev = ["beta"]\n'


def fingerprint(spec, *pins):
    """The fingerprint of a spec whose requirements were resolved to some versions."""
    return make_plan(read_request(spec), Resolution(pins)).recipe.fingerprint


@pytest.fixture
def folder(make_project):
    return make_project(more=MORE)


def test_lock(folder, project_spec):
    """One byte of the lock."""
    first = project_spec(folder).fingerprint()
    lock = folder / "uv.lock"
    lock.write_bytes(lock.read_bytes() + b"\n")
    assert project_spec(folder).fingerprint() != first


def test_pyproject(folder, project_spec):
    """Comments of the pyproject, its layout and what configures other tools do not count; dependencies do."""
    first = project_spec(folder).fingerprint()
    pyproject = folder / "pyproject.toml"
    text = pyproject.read_text()
    # With the same wheel: the backend of the tests reads nothing else.
    pyproject.write_text(f"# a comment\n{text}\n\n[tool.other]\nx = 1 # more\n[tool.fairlead.actor-environments]\n")
    assert project_spec(folder).fingerprint() == first
    for more in ('[tool.uv]\nno-build-isolation-package = ["a"]\n', '[tool.uv]\ndev-dependencies = ["gamma"]\n'):
        pyproject.write_text(text + more)
        assert project_spec(folder).fingerprint() != first
    pyproject.write_text(text)
    (folder / "uv.toml").write_text("no-cache = true\n")
    assert project_spec(folder).fingerprint() != first


def test_data_of_a_package(folder):
    """An edit is seen in every folder that may be shipped, whatever the folder is called."""
    data = folder / "src" / "proj" / "node_modules" / "t.txt"
    data.parent.mkdir()
    data.write_text("one")
    first = source_key(folder)
    data.write_text("other")
    assert source_key(folder) != first
    # What tools keep beside the pyproject is not the project's.
    (folder / "node_modules").mkdir()
    before = source_key(folder)
    (folder / "node_modules" / "t.txt").touch()
    assert source_key(folder) == before


def test_fields_of_projects(folder, project_spec):
    """Extras, groups, whether the code is installed, Python, setup, and settings; each gives another one."""
    specs = [
        project_spec(folder),
        project_spec(folder, extras=["x"]),
        project_spec(folder, extras=["x", "y"]),
        project_spec(folder, groups=["dev"]),
        project_spec(folder, install_project=False),
        project_spec(folder, install_project=False, python=OTHER_PYTHON),
        project_spec(folder, setup=["true"]),
        project_spec(folder, setup=["true", "1"]),
        project_spec(folder, env={"UV_TORCH_BACKEND": "cpu"}),
        project_spec(folder, system_site_packages=True),
        project_spec(folder, frozen=True),
    ]
    assert len({spec.fingerprint() for spec in specs}) == len(specs)
    assert (
        project_spec(folder, extras=["y", "x"]).fingerprint() == project_spec(folder, extras=["x", "y"]).fingerprint()
    )
    with_default = project_spec(folder, default_groups=True)
    assert with_default.fingerprint() == project_spec(folder, groups=["dev"]).fingerprint()
    assert with_default.fingerprint() != project_spec(folder, default_groups=True, no_groups=["dev"]).fingerprint()


def test_fields_of_requirements(wheels, tools, tmp_path):
    """The same for requirements, and for what is found by links."""
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


def test_name(folder, project_spec):
    """Whatever it is called, the content is the same, and so is the fingerprint in the folder's name."""
    fingerprint = project_spec(folder).fingerprint()
    for name in ("one", "two"):
        assert f"/{name}-{fingerprint[:12]}/bin/python" in create_local_venv(project_spec(folder), name)
    assert f"/proj-{fingerprint[:12]}/bin/python" in create_local_venv(project_spec(folder))


def test_packing(make_project, project_spec):
    """When and in what order the files of a wheel are packed does not count."""
    folder = make_project()
    first = project_spec(folder).fingerprint()
    backend = folder / "backend.py"
    backend.write_text(
        backend.read_text().replace('sorted(pathlib.Path("src")', 'sorted(pathlib.Path("src")') + "\n# again\n"
    )
    module = folder / "src" / "proj" / "__init__.py"
    module.write_text(module.read_text())
    assert project_spec(folder).fingerprint() == first


WORDS = st.lists(st.sampled_from(["numpy", "Ray", "idna>=3", "six ; sys_platform == 'linux'"]), max_size=6)


@settings(max_examples=50, deadline=None, database=None)
@given(first=WORDS, second=WORDS)
def test_equal_exactly_if_the_same(first, second):
    """Two lists of requirements that are resolved alike have one fingerprint exactly if they hold the same."""
    same = {one.lower() for one in first} == {one.lower() for one in second}
    prints = [fingerprint(VenvSpec(requirements=one), "numpy==2.0") for one in (first, second)]
    assert (prints[0] == prints[1]) == same
