# SPDX-License-Identifier: Apache-2.0
"""A cluster whose Ray or driver ends before it is shut down."""


def test_ray_ends_first(start_script):
    """Shutdown after Ray has ended, or on another Ray, is safe; a cluster that is left at exit prints nothing."""
    script = start_script(
        """
        import ray
        from fairlead_placement import PlacementError, RayVirtualCluster

        def start():
            ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)

        start()
        first, second = (RayVirtualCluster([1], use_gpus=False).reserve() for _ in range(2))
        first.get_master_address_and_port()
        second.get_master_address_and_port()
        ray.shutdown()
        print(first.shutdown(), first.shutdown())

        def refused():
            print(second)
            try:
                second.slots()
            except PlacementError as error:
                print(error)
            return ray.is_initialized()

        print(refused())
        start()
        print(refused(), ray.cluster_resources()["CPU"], second.shutdown())
        second.reserve()
        print(len(second.slots()), second.get_master_address_and_port()[1] > 0)
        """,
        PYTHONWARNINGS="ignore::FutureWarning",  # some versions of Ray warn about their own future
    )
    out, err = script.finish()

    name = "RayVirtualCluster([1], CPU, name='', its Ray has been shut down)"
    refusals = [name, f"{name}, on which it was reserved. Call shutdown(), and reserve it again."]
    assert out.split("\n") == ["True True", *refusals, "False", *refusals, "True 2.0 True", "1 True", ""]
    assert err == ""


def test_import_is_light(run_script):
    """Importing the package starts neither Ray nor an agent."""
    out = run_script("""
        import fairlead_placement, ray
        from fairlead_placement import testing
        print(ray.is_initialized())
        """)
    assert out == "False\n"


def test_at_exit(run_script):
    """At interpreter exit nothing is released, and an object that is dropped then does not delay the exit."""
    out = run_script(
        """
        from fairlead_placement.extension import release_when_dropped

        class Owner:
            pass

        kept = Owner()
        release_when_dropped(kept, lambda: "held", lambda: print("released"))
        """,
        PYTHONWARNINGS="always::ResourceWarning",
    )
    assert out == ""


def test_ray_is_shut_down_meanwhile(run_script):
    """A release that waits for an agent does not delay `ray.shutdown()`, and drops its references without an end of
    the process."""
    out = run_script(
        """
        import threading
        import time

        import ray

        from fairlead_placement.extension import collect, release_when_dropped

        ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error")

        @ray.remote
        class Agent:
            def hang(self):
                time.sleep(60)

        agent = Agent.remote()
        releasing, released = threading.Event(), threading.Event()

        class Owner:
            pass

        def release():
            releasing.set()
            try:
                collect({"agent": agent.hang.remote}, 60.0)
            finally:
                released.set()

        release_when_dropped(Owner(), lambda: "", release)
        releasing.wait(30)
        ray.shutdown()
        print(released.wait(30))
        """
    )
    assert out == "True\n"
