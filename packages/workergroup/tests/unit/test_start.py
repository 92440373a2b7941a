# SPDX-License-Identifier: Apache-2.0
"""The start of a group without Ray: the slots and the variables of its workers."""

import dataclasses

import pytest

from fairlead_placement import Slot
from fairlead_placement.extension import count_bundles
from fairlead_workergroup._launch import _count_for_each_node
from fairlead_workergroup._membership.losses import start_error
from fairlead_workergroup._membership.places import lay_out
from fairlead_workergroup._model import Member
from fairlead_workergroup._start.environment import (
    RANK_VARIABLES,
    check_env_vars,
    forwarded_variables,
    worker_environment,
)


@dataclasses.dataclass(frozen=True)
class SomeGroup:
    """What the layout looks at of a placement group: who it is."""

    id: str


def slots(*counts: int, unified: bool = False, physical: tuple[str, ...] | None = None) -> list[Slot]:
    """Slots of logical nodes with so many bundles, each on a physical node of its own unless named."""
    made: list[Slot] = []
    for node_idx, count in enumerate(counts):
        node_id = physical[node_idx] if physical else f"node{node_idx}"
        for bundle in range(count):
            made.append(
                Slot(
                    placement_group=SomeGroup("all" if unified else f"group{node_idx}"),
                    bundle_index=len(made) if unified else bundle,
                    node_idx=node_idx,
                    node_id=node_id,
                    node_ip=f"10.0.0.{node_idx}",
                    node_rank=node_idx,
                    local_rank=bundle,
                )
            )
    return made


def where(places) -> list[tuple[int, int]]:
    return [(place.slot.node_idx, place.slot.bundle_index) for place in places]


class TestOnePerSlot:
    def test_order_and_names(self):
        """Ranks follow the slots; the name says node and bundle."""
        places = lay_out(slots(2, 1), prefix="p")
        assert where(places) == [(0, 0), (0, 1), (1, 0)]
        assert [place.name for place in places] == ["p-0-0", "p-0-1", "p-1-0"]
        assert [place.rank for place in places] == [0, 1, 2]
        assert [place.tied_group for place in places] == [0, 1, 2]
        assert places[2].tied_bundles == (1, [0])

    def test_node_ranks_count_physical_nodes(self):
        """NODE_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE count physical nodes, which logical nodes may share."""
        places = lay_out(slots(2, 1, 1, physical=("a", "b", "a")), prefix="p")
        assert [(p.node_rank, p.local_rank, p.local_world_size) for p in places] == [
            (0, 0, 3),
            (0, 1, 3),
            (1, 0, 1),
            (0, 2, 3),
        ]

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            (1, [(0, 0), (1, 0), (3, 0)]),
            (2, None),
            ([2, 0, 1], [(0, 0), (0, 1), (3, 0)]),
            ((3, 1, 2), [(0, 0), (0, 1), (0, 2), (1, 0), (3, 0), (3, 1)]),
        ],
    )
    def test_workers_per_node(self, wanted, expected):
        """The first slots of each logical node in use are chosen, as many as requested."""
        there = slots(3, 1, 0, 2)
        if expected is None:
            with pytest.raises(ValueError, match=r"asks for 2 worker\(s\) on logical node 1, which has 1 slot\(s\)"):
                lay_out(there, prefix="p", workers_per_node=wanted)
        else:
            assert where(lay_out(there, prefix="p", workers_per_node=wanted)) == expected

    @pytest.mark.parametrize(
        ("wanted", "error", "message"),
        [
            ([1], ValueError, r"has 1 entries \[1\], but 2 logical nodes are in use: \[0, 1\]"),
            ([0, 0], ValueError, "leaves no worker"),
            (-1, ValueError, "asks for -1 worker"),
            (True, ValueError, "must be an int or a list of ints"),
            ("2", ValueError, "must be an int or a list of ints"),
            ([1, 1.5], ValueError, "must be an int or a list of ints"),
        ],
    )
    def test_bad_workers_per_node(self, wanted, error, message):
        """The error has the request."""
        with pytest.raises(error, match=message):
            lay_out(slots(2, 2), prefix="p", workers_per_node=wanted)


class TestTiedGroups:
    def test_order_and_names(self):
        """Ranks follow the list; workers of a tied group of several are named by it."""
        places = lay_out(slots(4, 4), prefix="p", bundle_indices_list=[(1, [2, 3]), (0, [0, 1]), (0, [3])])
        assert where(places) == [(1, 2), (1, 3), (0, 0), (0, 1), (0, 3)]
        assert [place.name for place in places] == ["p-grp0-0", "p-grp0-1", "p-grp1-0", "p-grp1-1", "p-0-3"]
        assert [(place.tied_group, place.tied_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
        assert places[1].tied_bundles == (1, [2, 3])

    def test_unified(self):
        """In one placement group over all nodes a tied group may span nodes."""
        places = lay_out(slots(2, 2, unified=True), prefix="p", bundle_indices_list=[(0, [0, 2]), (0, [1, 3])])
        assert [place.slot.node_id for place in places] == ["node0", "node1", "node0", "node1"]

    @pytest.mark.parametrize(
        ("groups", "error", "message"),
        [
            ([], ValueError, "bundle_indices_list is empty"),
            ([(0, [])], ValueError, r"bundle_indices_list\[0\] names no bundle of logical node 0"),
            ([(5, [0])], ValueError, r"names logical node 5; in use are \[0, 1\]"),
            ([(0, [0, 7])], ValueError, r"names bundle 7 of logical node 0, which has \[0, 1\]"),
            ([(0, [0]), (0, [1, 0])], ValueError, "bundle 0 of logical node 0 is in tied groups 0 and 1"),
            ([0], TypeError, r"\(node_idx, \[bundle indices\]\) pairs, got 0"),
            ([(0, 1)], TypeError, "pairs"),
        ],
    )
    def test_bad_lists(self, groups, error, message):
        """The error has the available bundles."""
        with pytest.raises(error, match=message):
            lay_out(slots(2, 2), prefix="p", bundle_indices_list=groups)

    @pytest.mark.parametrize("options", [{"workers_per_node": 1}, {"bundle_indices_list": [(0, [0])]}])
    def test_slots_of_several_clusters(self, options):
        """Numbers that occur in two clusters do not identify a slot."""
        there = [*slots(2), *(dataclasses.replace(slot, placement_group=SomeGroup("other")) for slot in slots(2))]
        assert where(lay_out(there, prefix="p")) == [(0, 0), (0, 1)] * 2
        with pytest.raises(ValueError, match="2 slots are bundle 0 of logical node 0"):
            lay_out(there, prefix="p", **options)


@pytest.mark.parametrize(
    ("workers", "rooms", "counts"),
    [
        (4, [4], [4]),
        (4, [2, 2], [2, 2]),
        (16, [8, 8, 4], [8, 8]),
        (12, [8, 8], [6, 6]),
        (6, [3, 1, 2], [1] * 6),
        (5, [4, 4], [1] * 5),
        (5, [4], [5]),
        (4, [], [4]),
        (20, [count_bundles({"GPU": 0.1}, {"GPU": 1.0})] * 2, [10, 10]),
    ],
)
def test_spread(workers, rooms, counts):
    """Nodes get the largest equal parts that fit; what fits nowhere stays whole, so that it is refused as a whole."""
    assert _count_for_each_node(workers, rooms) == counts


NOTHING: dict[str, str] = {}


def make_environment(**layers):
    names = ("driver", "of_class", "of_slot", "of_user", "of_rank", "configured")
    given = {name: layers.get(name, NOTHING) for name in names}
    return worker_environment(**{**given, "driver": forwarded_variables(given["driver"])})


class TestLayers:
    def test_precedence(self):
        """The order is class, driver, user, slot, rank, configure_worker, and each overrides those before it."""
        layers = ["of_class", "driver", "of_user", "of_slot", "of_rank", "configured"]
        for at, name in enumerate(layers):
            given = {one: {"NCCL_DEBUG": one} for one in layers[: at + 1]}
            assert make_environment(**given)[0] == {"NCCL_DEBUG": name}

    def test_forwarded_variables(self):
        """Only the driver's variables of communication libraries and shared folders are forwarded."""
        forwarded = {"NCCL_DEBUG": "1", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_NCCL_BLOCKING_WAIT": "1", "HF_HOME": "/h"}
        driver = {**forwarded, "PATH": "/bin", "API_TOKEN": "secret", "PYTHONPATH": "/x", "LD_PRELOAD": "y"}
        made = make_environment(driver=driver)
        assert made == (forwarded, {})

    @pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "RAY_ADDRESS", *RANK_VARIABLES])
    def test_never_forwarded(self, name):
        """Ray's choices and rank variables are not taken from the driver, and are left out of env_vars."""
        assert make_environment(driver={name: "1", f"NCCL_{name}": "1"})[0].get(name) is None
        assert check_env_vars({name: "1", "MINE": "2"}) == {"MINE": "2"}

    def test_left_out(self, caplog):
        """All names of env_vars that workers do not get are in one line."""
        given = {"RANK": "7", "MASTER_ADDR": "a", "RAY_JOB_ID": "1", "MINE": "2"}
        assert check_env_vars(given) == {"MINE": "2"}
        lines = [one.getMessage() for one in caplog.records]
        assert [line.partition(" of env_vars")[0] for line in lines] == [
            "Workers do not get MASTER_ADDR, RANK, RAY_JOB_ID"
        ]

    def test_configure_worker_warns(self, caplog):
        """A warning names the variables that configure_worker overrides."""
        make_environment(of_rank={"RANK": "3"}, of_user={"A": "1"}, configured={"RANK": "0", "A": "2", "B": "3"})
        assert caplog.messages == ["configure_worker overrides A, RANK for rank 3"]

    def test_split(self):
        """Variables that are read when a process starts need a new one; others are set in it."""
        loader = "LD_PRELOAD PYTHONPATH MALLOC_ARENA_MAX GLIBC_TUNABLES LD_LIBRARY_PATH LC_ALL TZ ASAN_OPTIONS"
        new = dict.fromkeys(loader.split(), "1")
        made = make_environment(of_user={"OMP_NUM_THREADS": "2", **new})
        assert made == ({"OMP_NUM_THREADS": "2"}, new)


def test_wrong_constructor_arguments():
    """The error names the options for the arguments of a constructor, if they are what is wrong."""
    (place,) = lay_out(slots(1), prefix="p")
    member = Member(place, handle=None, actor_id="an actor", node_id="node", pid=71, started=1)
    for error, is_named in (
        (TypeError("Model.__init__() missing 1 required positional argument: 'path'"), True),
        (TypeError("Model() takes no arguments"), True),
        (TypeError("unsupported operand type(s) for +: 'int' and 'str'"), False),
        (ValueError("f() is no argument"), False),
    ):
        text = str(start_error(error, member, 0, [], None))
        assert ("init_args and init_kwargs of launch" in text) is is_named


def test_module_that_a_worker_cannot_import(tmp_path, monkeypatch):
    """The error names the folder from which the driver imports the module, as the PYTHONPATH of the workers."""
    (place,) = lay_out(slots(1), prefix="p")
    member = Member(place, handle=None, actor_id="an actor", node_id="node", pid=71, started=1)
    (tmp_path / "fairlead_own_models").mkdir()
    (tmp_path / "fairlead_own_models" / "nets.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name, remedy in (
        ("fairlead_own_models", f'env_vars={{"PYTHONPATH": {str(tmp_path)!r}}}'),
        ("fairlead_own_models.nets", f'env_vars={{"PYTHONPATH": {str(tmp_path)!r}}}'),
        ("fairlead_own_models.net", f"Check the name: the package in {tmp_path} does not have it either"),
        ("fairlead_nowhere", "Check the name"),
        ("pytest", "Install it in the workers' Python"),
    ):
        error = ModuleNotFoundError(f"No module named {name!r}", name=name)
        text = str(start_error(error, member, 0, [], None))
        assert f"its Python cannot import the module {name!r}" in text
        assert remedy in text
        assert "constructor raised" not in text
