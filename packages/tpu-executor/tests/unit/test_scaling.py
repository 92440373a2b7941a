# SPDX-License-Identifier: Apache-2.0
"""How many slices to hold, and how long to wait for them."""

from hypothesis import given
from hypothesis import strategies as st

from fairlead_tpu_executor import TpuAcceleratorConfig
from fairlead_tpu_executor._reserve import scaling
from fairlead_tpu_executor._reserve.scaling import choose_size, choose_waits, show_missing


def test_patience():
    """The wait for a replacement is much longer than for the first slices, but a smaller allowed number is accepted."""
    limits = {"scale_s": 600.0, "replace_s": 86400.0}
    assert choose_waits([2], 0, 0, **limits) == (600.0, 600.0)
    assert choose_waits([2], 1, 1, **limits) == choose_waits([1, 2], 1, 1, **limits) == (600.0, 86400.0)
    assert choose_waits([1, 2], 1, 0, **limits) == (0.0, 0.0)
    assert choose_waits([2], 1, 1, scale_s=600.0, replace_s=5.0) == (5.0, 5.0)


@given(st.sets(st.integers(1, 8), min_size=1), st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_sizes(sizes, held, free, waited_out):
    """The largest size is chosen at once if available; after the wait the largest available size; never another."""
    size = choose_size(sorted(sizes), held, free, waited_out=waited_out)
    possible = {one for one in sizes if one <= held + free}
    if max(sizes) in possible:
        assert size == max(sizes)
    elif waited_out and possible:
        assert size == max(possible)
    else:
        assert size is None


def test_a_node_type_can_satisfy_the_demand(monkeypatch):
    """An autoscaler can satisfy the demand with a node type that has the resources of a host, and no labels.

    A host gets its worker id and the name of its slice when it starts. KubeRay's node types for TPUs have no labels.
    """
    node_type = {"CPU": 100.0, "TPU": 4.0, "TPU-v4-16-head": 1.0}
    asked = []

    def placement_group(bundles, *, bundle_label_selector=None, **_):
        asked.extend(zip(bundles, bundle_label_selector or [{}] * len(bundles), strict=True))

    monkeypatch.setattr(scaling, "autoscaler_is_there", lambda: True)
    monkeypatch.setattr(scaling, "placement_group", placement_group)
    show_missing(TpuAcceleratorConfig("v4-16"), [], 1)
    assert len(asked) == 2
    assert [bundle for bundle, _ in asked if any(node_type.get(name, 0.0) < of for name, of in bundle.items())] == []
    assert [selector for _, selector in asked if selector] == []
