# SPDX-License-Identifier: Apache-2.0
"""A ledger in an actor: several generators and one trainer share it."""

import asyncio
from typing import ClassVar

import pytest

ray = pytest.importorskip("ray", reason="the actor needs Ray")

import fairlead_rollouts.ray  # noqa: E402
from fairlead_rollouts import Claim, Ledger, LedgerConfig, Ref, Shortage  # noqa: E402
from fairlead_rollouts.ray import LedgerHandle, LedgerHost, start_ledger  # noqa: E402

CONFIG = LedgerConfig(group_size=2, groups_per_version=4, max_staleness=1)


def make():
    return Ledger(CONFIG, list(range(40)), checkpoints=False)


@ray.remote(num_cpus=0)
def generate(ledger: LedgerHandle):
    """Generate until the source has ended."""
    groups = 0
    while leases := ray.get(ledger.lease(2)):
        results = [(lease, sibling, Ref(lease.prompt)) for lease in leases for sibling in lease.siblings]
        assert all(ray.get(ledger.seal_many(results)))
        groups += len(leases)
    return groups


def test_generators_and_a_trainer(local_ray):
    """All prompts are trained once, whoever generates them."""
    ledger = start_ledger(make)
    generators = [generate.remote(ledger) for _ in range(3)]
    trained = []
    for step in range(1, 11):
        claim = ray.get(ledger.claim(step, 4), timeout=60)
        assert isinstance(claim, Claim)
        trained += [group.ordinal for group in claim.groups]
        ray.get(ledger.advance(step, trained=step))
    assert sorted(trained) == list(range(40))
    assert sum(ray.get(generators, timeout=60)) == 40
    assert ray.get(ledger.call("state", 7)) == "applied"


def test_a_cancelled_request_takes_nothing(local_ray):
    """A claim that waits in the actor ends with `ray.cancel`, and the groups go to the next claim."""
    ledger = start_ledger(make)
    waiting = ledger.claim(1, 1)
    leases = ray.get(ledger.lease(1))
    ray.cancel(waiting)
    with pytest.raises((ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError)):
        ray.get(waiting, timeout=60)
    assert ray.get(ledger.seal(leases[0], 0, Ref("a")))
    assert ray.get(ledger.fail(leases[0], reason="it broke"))
    assert isinstance(ray.get(ledger.claim(1, 1, timeout_s=0.1)), Shortage)
    ray.get(ledger.call("check"))


class Recorded:
    """A gauge that notes what it is set to."""

    values: ClassVar = {}

    def __init__(self, name, description, tag_keys):
        assert description
        self.name, self.tag_keys = name, set(tag_keys)

    def set(self, value, tags):
        assert tags.keys() == self.tag_keys
        self.values[self.name, *tags.values()] = value


def test_the_numbers_are_published_after_a_call(monkeypatch):
    """A call updates all gauges a moment later, once for all calls until then."""
    monkeypatch.setattr(fairlead_rollouts.ray, "Gauge", Recorded)
    monkeypatch.setattr(fairlead_rollouts.ray, "PUBLISH_S", 0.05)

    async def run():
        host = LedgerHost(make, "prompts")
        leases = await host.call("lease", (3,), {})
        assert Recorded.values == {}
        for sibling in (0, 1):
            await host.call("seal", (leases[0], sibling, Ref(sibling)), {})
        await host.call("drop", ([leases[0].ordinal], "no_signal"), {})
        await asyncio.sleep(0.2)

    asyncio.run(run())
    expected = {("groups", "prompts", "leased"): 2, ("drops", "prompts", "no_signal"): 1, ("version", "prompts"): 0}
    found = {("fairlead_rollouts_" + name, *rest): value for (name, *rest), value in expected.items()}
    assert found.items() <= Recorded.values.items()


def test_gauges(run_python, unused_port):
    """With ray[default] Ray's gauges have the values of the statistics, by ledger."""
    pytest.importorskip("opentelemetry.exporter.prometheus")
    script = f"""
        import time, urllib.request
        import ray
        from fairlead_rollouts import Ledger, LedgerConfig, Ref
        from fairlead_rollouts.ray import start_ledger
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False,
            _metrics_export_port={unused_port}, _system_config={{"metrics_report_interval_ms": 1000}},
        )
        config = LedgerConfig(group_size=1, groups_per_version=4, max_staleness=1)
        ledger = start_ledger(lambda: Ledger(config, list(range(9))), name="prompts")
        lease, *_ = ray.get(ledger.lease(3))
        ray.get(ledger.seal(lease, 0, Ref("a")))
        ray.get(ledger.call("drop", [lease.ordinal], "no_signal"))
        def shows(*parts):
            return any(all(part in line for part in parts) for line in lines)

        lines, deadline = [], time.monotonic() + 60
        # One export may see the gauges of two updates.
        while not (shows("drops", "no_signal") and shows("leased", " 2.0") and shows("room", " 6.0")):
            assert time.monotonic() < deadline, lines
            time.sleep(0.5)
            try:
                text = urllib.request.urlopen("http://127.0.0.1:{unused_port}/metrics", timeout=30).read().decode()
            except OSError:
                continue  # not up yet
            lines = [line for line in text.splitlines() if line.startswith("ray_fairlead_rollouts_")]
        print(*lines, sep="\\n")
    """
    # Without a mode Ray prints a warning about tokens.
    lines = [line for line in run_python(script, RAY_AUTH_MODE="disabled").splitlines() if 'ledger="prompts"' in line]
    found = {line.partition("{")[0].removeprefix("ray_fairlead_rollouts_"): line for line in lines if " 0" not in line}
    assert float(found["room"].split()[-1]) == 6
    assert 'reason="no_signal"' in found["drops"]
    leased = [line for line in lines if line.startswith("ray_fairlead_rollouts_groups{") and 'state="leased"' in line]
    assert [float(line.split()[-1]) for line in leased] == [2]
