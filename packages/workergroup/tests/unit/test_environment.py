# SPDX-License-Identifier: Apache-2.0
"""The variables of workers: their sources and precedence."""

from collections import Counter
from types import SimpleNamespace

import pytest

from fairlead_placement import Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup._start import environment
from fairlead_workergroup._start.environment import (
    RANK_VARIABLES,
    WorkerPython,
    check_env_vars,
    forwarded_variables,
    worker_environment,
)
from fairlead_workergroup._start.launch import plan_workers
from fairlead_workergroup._start.layout import lay_out
from fairlead_workergroup._start.worker_class import WorkerClass

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
            assert make_environment(**given).variables == {"NCCL_DEBUG": name}

    def test_forwarded_variables(self):
        """Only the driver's variables of communication libraries and shared folders are forwarded."""
        forwarded = {"NCCL_DEBUG": "1", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_NCCL_BLOCKING_WAIT": "1", "HF_HOME": "/h"}
        driver = {**forwarded, "PATH": "/bin", "API_TOKEN": "secret", "PYTHONPATH": "/x", "LD_PRELOAD": "y"}
        environment = make_environment(driver=driver)
        assert environment.variables == forwarded
        assert (environment.loader_variables, environment.path) == ({}, ())

    @pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "RAY_ADDRESS", *RANK_VARIABLES])
    def test_never_forwarded(self, name):
        """Ray's choices and rank variables are not taken from the driver, and are refused in env_vars."""
        assert make_environment(driver={name: "1", f"NCCL_{name}": "1"}).variables.get(name) is None
        with pytest.raises(ValueError, match=f"env_vars may not name '{name}'"):
            check_env_vars({name: "1"})

    @pytest.mark.parametrize("env_vars", [{"A": 1}, {1: "a"}, {"A": None}])
    def test_only_text(self, env_vars):
        """Names and values are strings."""
        with pytest.raises(TypeError, match="env_vars must map names to strings"):
            check_env_vars(env_vars)

    def test_split(self):
        """PYTHONPATH goes into sys.path, loader variables need a new process, others are set in the process."""
        environment = make_environment(
            of_user={"PYTHONPATH": "/a::/b", "LD_PRELOAD": "x", "PYTHONHASHSEED": "0", "A": "1"}
        )
        assert environment.path == ("/a", "/b")
        assert environment.loader_variables == {"LD_PRELOAD": "x", "PYTHONHASHSEED": "0"}
        assert environment.variables == {"A": "1"}

    @pytest.mark.parametrize(
        "name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_LIBRARY_PATH", "LC_ALL", "TZ", "ASAN_OPTIONS"]
    )
    def test_loader_variables(self, name):
        """Variables that are read only when a process starts need a new process; others do not."""
        environment = make_environment(of_user={name: "1", "OMP_NUM_THREADS": "2"})
        assert (environment.loader_variables, environment.variables) == ({name: "1"}, {"OMP_NUM_THREADS": "2"})

    def test_configure_worker_warns(self, caplog):
        """A warning names the variables that configure_worker overrides."""
        make_environment(of_rank={"RANK": "3"}, of_user={"A": "1"}, configured={"RANK": "0", "A": "2", "B": "3"})
        assert caplog.messages == ["configure_worker overrides A, RANK for rank 3"]


def test_the_environment_is_filtered_once(monkeypatch):
    """Each variable of the driver is matched once per group, however many workers the group has."""
    matched = Counter()
    match = environment.fnmatch.fnmatchcase

    def count(name, pattern):
        matched[name, pattern] += 1
        return match(name, pattern)

    monkeypatch.setattr(environment.fnmatch, "fnmatchcase", count)
    environment._matches.cache_clear()
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    plans = make_plans(64, {"A": "1"})
    assert [plan.environment.variables["RANK"] for plan in plans] == [str(rank) for rank in range(64)]
    assert all(plan.environment.variables["NCCL_DEBUG"] == "INFO" for plan in plans)
    # Once against the variables that are forwarded, once against those that a new process needs.
    assert max(matched.values()) <= 2


def make_plans(count, env_vars):
    """Return the plans of workers on one node."""
    group = SimpleNamespace(id="group", bundle_specs=[{"CPU": 1.0}] * count)
    slots = [
        Slot(
            placement_group=group,
            bundle_index=at,
            node_idx=0,
            node_id="node",
            node_ip="10.0.0.1",
            node_rank=0,
            local_rank=at,
            worker_resources={"CPU": 1.0},
        )
        for at in range(count)
    ]
    return plan_workers(
        lay_out(slots, prefix="p"),
        WorkerClass("a.B", "B", {}),
        sharding=NamedSharding.from_shape(dp=count),
        env_vars=env_vars,
        python=WorkerPython(),
    )


class TestEachPlace:
    def test_values(self):
        """A function gives each worker its own variables, which a change of the group may change."""
        plans = make_plans(2, lambda place: {"RAY_LOCAL_WORLD_SIZE": str(place.local_world_size), "ME": place.name})
        assert [plan.environment.variables["RAY_LOCAL_WORLD_SIZE"] for plan in plans] == ["2", "2"]
        assert [plan.environment.variables["ME"] for plan in plans] == ["p-0-0", "p-0-1"]
        assert plans[0].of_rank == {*RANK_VARIABLES, "RAY_LOCAL_WORLD_SIZE", "ME"}
        assert make_plans(1, {"ME": "1"})[0].of_rank == {*RANK_VARIABLES}

    def test_refusals(self):
        """The names and values are checked as those of a mapping are."""
        with pytest.raises(ValueError, match="env_vars may not name 'RANK'"):
            make_plans(1, lambda place: {"RANK": "1"})
        with pytest.raises(TypeError, match="env_vars must map names to strings"):
            make_plans(1, lambda place: {"ME": place.rank})
        with pytest.raises(TypeError, match=r"env_vars must return a mapping .* got None"):
            make_plans(1, lambda place: None)
        with pytest.raises(ValueError, match=r"\['LEADER'\] are there for some only"):
            make_plans(2, lambda place: {"LEADER": "1"} if place.rank == 0 else {})
