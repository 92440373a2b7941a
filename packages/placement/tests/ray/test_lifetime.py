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


def test_few_functions_and_one_thread(run_script):
    """A reservation enters few functions of the package, on the calling thread and at most one other at a time."""
    out = run_script(
        """
        import _thread, sys, threading
        from pathlib import Path
        import ray
        import fairlead_placement

        source, entered, jobs, at_once = str(Path(fairlead_placement.__file__).parent), set(), [], [0]

        def note(frame, event, _):
            code = frame.f_code
            # Comprehensions and generator expressions are parts of a function.
            if event == "call" and code.co_filename.startswith(source) and code.co_name[-5:] not in ("comp>", "expr>"):
                entered.add(code)

        ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="error")
        before = set(threading.enumerate())
        start = _thread.start_new_thread

        def start_noted(run, args):
            jobs.append(args[0])
            at_once.append(sum(not job.future.done() for job in jobs))
            return start(lambda: (sys.setprofile(note), run(*args)), ())

        _thread.start_new_thread = start_noted
        sys.setprofile(note)
        cluster = fairlead_placement.RayVirtualCluster([4], use_gpus=False).reserve()
        sys.setprofile(None)
        _thread.start_new_thread = start
        # Python keeps a dummy for a thread of `_thread`, also when that has ended.
        threads = [one for one in threading.enumerate() if not isinstance(one, threading._DummyThread)]
        print(len(entered), max(at_once) + len(set(threads) - before))
        cluster.shutdown()
        """
    )
    functions, threads = map(int, out.split())
    assert functions <= 35
    assert threads <= 1
