# SPDX-License-Identifier: Apache-2.0
"""Links to and from workers in an environment that has Ray and one tensor library, and nothing of Fairlead."""

import pytest
import ray

from fairlead_transfer import Link
from fairlead_venvs import VenvSpec
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup

from ..plain import Columns

SLOTS = 6

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    """Build environments in a folder of this test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRLEAD_VENV_DIR", str(tmp_path_factory.mktemp("venvs")))
        yield


def check_sends(there, here, other, packages):
    """Send from the driver's environment to another one, within that one, and back."""
    assert there.call("packages").result() == [packages] * 2
    version = 0
    for source, target in ((here, there), (there, other), (other, here)):
        for transport in ("auto", "object_store"):
            with Link(
                source, target, source="weights", target="weights", transport=transport, check_replicas="always"
            ) as link:
                for _ in range(2):  # The second send uses what the first one has made.
                    version += 1
                    source.call("fill", float(version)).result()
                    report = link.send(version, timeout=60)
                    assert report.replicas_compared
                    assert set(target.call("holds").result()) == {float(version)}


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.nightly)])
def test_groups_in_different_environments(slots, library):
    """Tensors go into an environment that lacks Fairlead, between two groups there, and back."""
    tensors = pytest.importorskip(library)
    spec = VenvSpec(requirements=[f"ray=={ray.__version__}", f"{library}=={tensors.__version__.partition('+')[0]}"])
    with (
        RayWorkerGroup(slots[:2], RayWorkerBuilder(Columns, library), python=spec) as there,
        RayWorkerGroup(slots[2:3], RayWorkerBuilder(Columns, "numpy")) as here,
        RayWorkerGroup(slots[3:5], RayWorkerBuilder(Columns, library), python=spec) as other,
    ):
        check_sends(there, here, other, [library])
