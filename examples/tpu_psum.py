# SPDX-License-Identifier: Apache-2.0
"""Sum over all hosts of two TPU slices with JAX, and lose one of the slices in the middle.

`nox -s examples -- tpu_psum` runs the example without TPUs, on pretend slices of this machine with JAX on CPUs.
`initialize_jax` joins the four hosts in one JAX cluster. The function `train` is meant to run on TPUs as well, without
`JAX_PLATFORMS` and `XLA_FLAGS`. On TPUs, libtpu also reads the `MEGASCALE_*` variables that a run on several slices
sets. This has not been tested on TPUs.
"""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fairlead_tpu_executor import SlicePool, initialize_jax
from fairlead_tpu_executor.testing import PretendSlices

CPU = {"env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}}


def train(folder: str, steps: int) -> tuple[str, int, list[float]]:
    """Join all hosts of all slices, and sum a number over them in each step. The pool runs this on every host."""
    initialize_jax(timeout_s=60)
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    host, slice_number = int(os.environ["EXECUTOR_CALL_INDEX"]), int(os.environ["EXECUTOR_CALL_SLICE"])
    devices = jax.local_device_count()
    psum = jax.pmap(lambda x: jax.lax.psum(x, "hosts"), axis_name="hosts")
    sums = []
    for step in range(steps):
        mine = jnp.full((devices,), 10.0 * slice_number + host + step)
        sums.append(float(psum(mine)[0]))
        Path(folder, f"{os.environ['TPU_SLICE_NAME']}-{host}-{step}").touch()
        time.sleep(0.5)
    multihost_utils.sync_global_devices("done")
    jax.distributed.shutdown()
    return os.environ["TPU_SLICE_NAME"], jax.process_count(), sums


def main() -> None:
    with PretendSlices() as slices, tempfile.TemporaryDirectory() as folder:
        print("starting", slices.add_slice(), "and", slices.add_slice(), flush=True)
        # With no retries for failures, the run succeeds only if the errors after a lost host count as a preemption.
        options = {
            "execution_env": CPU,
            "max_retries_failure": 0,
            "max_retries_preemption": 1,
            "scale_timeout_s": 120.0,
        }
        with SlicePool("v4-16", 2, cpu_count=1, grace_s=20.0, **options) as pool, ThreadPoolExecutor() as threads:
            running = threads.submit(pool.run, train, folder, 6)
            lose_a_host(slices, Path(folder))
            results = running.result()
            for name, processes, sums in results:
                print(f"{name}: {processes} processes, sums {sums}")
            print("on", *(place.slice_name for place in pool.slices))
    # The sum of 10 * slice + host + step over two slices of two hosts is 22 in step 0, and rises by 4 in each step.
    sums = [22.0, 26.0, 30.0, 34.0, 38.0, 42.0]
    assert results == [(name, 4, sums) for name in ("slice-1", "slice-3") for _ in range(2)], results


def lose_a_host(slices: PretendSlices, folder: Path) -> None:
    """Kill a host of the second slice after its third step, and add a new slice."""
    deadline = time.monotonic() + 120
    while not list(folder.glob("slice-2-1-2")):
        if time.monotonic() > deadline:
            raise TimeoutError("slice-2 did not reach its third step")
        time.sleep(0.05)
    slices.kill("slice-2", 1)
    print("killed a host of slice-2, starting", slices.add_slice(), flush=True)


if __name__ == "__main__":
    main()
