# SPDX-License-Identifier: Apache-2.0
"""Several drivers on one cluster, and who may be one."""

import pytest
import ray

from fairlead_placement import PlacementError, PlacementTimeoutError, RayVirtualCluster, init_ray, lease_ports


def test_reservations_exclude_each_other(hosts, addresses):
    """What one driver holds another does not get: it is told who, and gets it when it has been given back."""

    def driver(name):
        with RayVirtualCluster([2, 2, 2, 2], use_gpus=False, name=name) as cluster:
            yield [slot.node_ip for slot in cluster.slots()]
        yield

    def refused():
        with pytest.raises(PlacementTimeoutError, match="others hold") as caught:
            RayVirtualCluster([2], use_gpus=False, reserve_timeout_s=2).reserve()
        return caught.value.report.holders

    everything = [address for address in addresses for _ in range(2)]
    with hosts.driver(driver, "first") as first:
        assert first.step() == everything
        holders = hosts.drive(refused)
        assert sorted(holder.name.rpartition("-")[0] for holder in holders) == [f"first-{node}" for node in range(4)]
        assert len({holder.job_id for holder in holders}) == 1
        first.step()
        with hosts.driver(driver, "second") as second:
            assert second.step() == everything
            second.step()


def test_leases_exclude_each_other(hosts):
    """Two drivers that lease 64 ports each on one host at the same time get 128 different ones."""

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
        assert len({port for each in both for port in each.answer()}) == 128
        for each in both:
            each.step()


def attached(address):
    init_ray(address=address)
    return len(ray.nodes())


def test_right_token(hosts):
    """With the cluster's token a driver attaches."""
    assert hosts.drive(attached, hosts.address, attach=False) >= 5


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"RAY_AUTH_MODE": "disabled"}, id="off"),
        pytest.param({"RAY_AUTH_TOKEN_PATH": ""}, id="missing"),
        pytest.param({"RAY_AUTH_TOKEN": "0" * 64}, id="wrong"),
    ],
)
def test_no_token(hosts, env, tmp_path):
    """Without it there is one error, that says what to set."""
    env = {"HOME": str(tmp_path), "RAY_NUM_REDIS_GET_RETRIES": "2", **env}  # Ray tries for 20 s by default
    with pytest.raises(PlacementError, match=r"RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"):
        hosts.drive(attached, hosts.address, attach=False, env=env)


def test_without_tokens(make_hosts):
    """A cluster with token authentication turned off wants none, and does not mind one."""
    hosts = make_hosts(auth=False)
    hosts.start_host(num_cpus=1)
    assert hosts.drive(attached, hosts.address, attach=False, env={"RAY_AUTH_TOKEN_PATH": ""}) == 1
    assert hosts.drive(attached, hosts.address, attach=False, env={"RAY_AUTH_MODE": "token"}) == 1
