# SPDX-License-Identifier: Apache-2.0
"""Tests of several drivers on one cluster, and of token authentication."""

import pytest
import ray

from fairlead_placement import PlacementError, PlacementTimeoutError, RayVirtualCluster, init_ray, lease_ports


def test_reservations_exclude_each_other(hosts, addresses):
    """A driver cannot reserve resources that another driver holds. The error names the holder.

    Once the holder has released the resources, the reservation succeeds.
    """

    def driver(name):
        with RayVirtualCluster([2, 2, 2, 2], use_gpus=False, name=name) as cluster:
            yield [slot.node_ip for slot in cluster.slots()]
        yield

    def try_to_reserve():
        with pytest.raises(PlacementTimeoutError, match="others hold") as caught:
            RayVirtualCluster([2], use_gpus=False, reserve_timeout_s=2).reserve()
        return caught.value.report.holders

    everything = [address for address in addresses for _ in range(2)]
    with hosts.driver(driver, "first") as first:
        assert first.step() == everything
        holders = hosts.drive(try_to_reserve)
        assert sorted(holder.name.rpartition("-")[0] for holder in holders) == [f"first-{node}" for node in range(4)]
        assert len({holder.job_id for holder in holders}) == 1
        first.step()
        with hosts.driver(driver, "second") as second:
            assert second.step() == everything
            second.step()


@pytest.mark.nightly
def test_leases_exclude_each_other(hosts):
    """Two drivers that lease 64 ports each on one host at the same time get 128 different ports."""

    def driver():
        yield
        with RayVirtualCluster([1], use_gpus=False) as cluster:
            yield cluster.slots()[0].node_ip
            (leases,) = lease_ports(cluster.slots(), count=64)
            yield [lease.port for lease in leases]
            for lease in leases:
                lease.release()
        yield

    with hosts.driver(driver) as one, hosts.driver(driver) as other:
        both = (one, other)
        for each in both:
            each.step()
        assert one.step() == other.step()
        for each in both:
            each.resume()
        assert len({port for each in both for port in each.receive()}) == 128
        for each in both:
            each.step()


def count_nodes(address):
    init_ray(address=address)
    return len(ray.nodes())


@pytest.mark.nightly
def test_right_token(hosts):
    """A driver with the cluster's token can attach."""
    assert hosts.drive(count_nodes, hosts.address, attach=False) >= 5


@pytest.mark.nightly
@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"RAY_AUTH_MODE": "disabled"}, id="off"),
        pytest.param({"RAY_AUTH_TOKEN_PATH": ""}, id="missing"),
        pytest.param({"RAY_AUTH_TOKEN": "0" * 64}, id="wrong"),
    ],
)
def test_wrong_or_missing_token(hosts, env, tmp_path):
    """Without the cluster's token, the error names the variables to set."""
    env = {"HOME": str(tmp_path), "RAY_NUM_REDIS_GET_RETRIES": "2", **env}  # By default Ray retries for 20 s.
    with pytest.raises(PlacementError, match=r"RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"):
        hosts.drive(count_nodes, hosts.address, attach=False, env=env)


@pytest.mark.nightly
def test_authentication_turned_off(make_hosts):
    """A cluster without token authentication accepts drivers with and without a token."""
    hosts = make_hosts(auth=False)
    hosts.start_host(num_cpus=1)
    assert hosts.drive(count_nodes, hosts.address, attach=False, env={"RAY_AUTH_TOKEN_PATH": ""}) == 1
    assert hosts.drive(count_nodes, hosts.address, attach=False, env={"RAY_AUTH_MODE": "token"}) == 1
