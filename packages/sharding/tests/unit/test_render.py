# SPDX-License-Identifier: Apache-2.0
"""The repr and the text of a sharding."""

from fairlead_sharding import NamedSharding


def test_repr():
    """Shape, names and layout."""
    text = repr(NamedSharding.from_shape(dp=1, pp=2, tp=4))

    assert text.startswith("NamedSharding(shape=(1, 2, 4), names=['dp', 'pp', 'tp'], layout=[[[0 1 2 3]")


def test_repr_is_short():
    """numpy shortens a large layout."""
    assert len(repr(NamedSharding.from_shape(dp=1024, tp=64))) < 1000


def test_one_axis():
    """One axis is one line of ranks."""
    assert NamedSharding([5, 7, 11], ["dp"]).render().splitlines() == [
        "dp=3 (3 ranks)",
        "",
        "  dp=0  dp=1  dp=2",
        "     5     7    11",
    ]


def test_leading_axes():
    """There is one titled grid for each coordinate along all axes but the last two."""
    assert NamedSharding.from_shape(dp=2, pp=1, tp=2).render().splitlines() == [
        "dp=2, pp=1, tp=2 (4 ranks)",
        "",
        "dp=0",
        "      tp=0  tp=1",
        "pp=0     0     1",
        "",
        "dp=1",
        "      tp=0  tp=1",
        "pp=0     2     3",
    ]


def test_a_large_layout_is_shortened():
    """Grids, rows and columns are left out in the middle."""
    text = NamedSharding.from_shape(dp=64, pp=64, tp=64).render()

    assert len(text.splitlines()) < 200
    for part in ("dp=0", "dp=63", "pp=63", "tp=63", str(64**3 - 1), "..."):
        assert part in text
    assert "dp=32" not in text
