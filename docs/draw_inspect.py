# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the README and of two guides about hung jobs, from real hangs: `nox -s pictures`.

Process ids, node ids and addresses are those of the machine that draws.
"""

import dataclasses
import io
import os
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import ray
from rich.console import Console, RenderableType
from rich.text import Text

import fairlead_workergroup
from fairlead_inspect._diagnosis import diagnose
from fairlead_inspect._groups import SeenGroup, look_at_groups
from fairlead_inspect._stacks import fold_stacks
from fairlead_inspect._tables import draw_findings, draw_groups, draw_stacks
from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup
from fairlead_workergroup.spi import find_group

FOLDER = Path(__file__).parent / "pictures"
# Where the packages are installed on this machine, and where they would be.
INSTALLED = {
    str(Path(fairlead_workergroup.__file__).parent): "/env/lib/python3.11/site-packages/fairlead_workergroup",
    str(Path(ray.__file__).parent): "/env/lib/python3.11/site-packages/ray",
    str(Path(sys.base_prefix)): "/env",
}
TRAINER = """
import ctypes
import os
import time
from fairlead_workergroup import current_worker, report_progress

class Trainer:
    def train(self, batch):
        report_progress(step=batch, message=f"batch {batch}")
        loss = self.forward(batch)
        return self.reduce(loss)

    def forward(self, batch):
        return float(batch)

    def reduce(self, loss):
        with current_worker().waiting():
            time.sleep(600)

    def hang(self, pipe):
        ctypes.PyDLL(None).open(os.fsencode(pipe), os.O_RDONLY)
"""


def save(name: str, drawn: RenderableType, width: int, command: str = "") -> None:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(drawn)
    console.save_svg(str(FOLDER / f"{name}.svg"), title=f"python -m fairlead_inspect {command or name}", unique_id=name)
    print(f"wrote {FOLDER / name}.svg")


def with_usual_paths(seen: SeenGroup) -> SeenGroup:
    """Return the same with the paths of packages as they usually are."""

    def usual(text: str) -> str:
        for here, there in INSTALLED.items():
            text = text.replace(here, there)
        return text

    workers = tuple(dataclasses.replace(one, stacks=usual(one.stacks)) for one in seen.workers)
    return dataclasses.replace(seen, workers=workers)


def draw_hung_job(example: str, name: str) -> None:
    """Draw what the command prints about an example that hangs and does not use Fairlead."""
    ours, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (40, 104))
    env = {**os.environ, "TERM": "xterm-256color"}
    for variable in ("COLUMNS", "NO_COLOR"):
        env.pop(variable, None)
    job = [sys.executable, example, "--why"]
    with os.fdopen(ours, "rb", buffering=0) as printed:
        subprocess.run(job, cwd=FOLDER.parents[1], env=env, check=True, stdout=terminal, stderr=subprocess.DEVNULL)
        text = printed.read(65536).decode().replace("\r\n", "\n")  # all of it fits into the terminal's buffer
    os.close(terminal)
    shown = text.partition("\n")[2].replace(" --why", "").replace(sys.executable, "python")
    save(name, Text.from_ansi(shown.strip()), 104, "why")


def main() -> None:
    draw_hung_job("examples/hung_job.py", "hung-job")
    draw_hung_job("examples/hung_ray_train.py", "hung-ray-train")
    made: dict[str, type] = {}
    exec(compile(TRAINER, "/home/me/train.py", "exec"), made)
    init_ray(address="local", num_cpus=8)
    mesh = NamedSharding.from_shape(dp=4, tp=2)
    with (
        RayVirtualCluster([8], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, made["Trainer"], name_prefix="policy", sharding_annotations=mesh) as group,
        tempfile.TemporaryDirectory() as folder,
    ):
        pipe = os.path.join(folder, "pipe")
        os.mkfifo(pipe)
        group.at(dp=2, tp=1).call("hang", pipe)
        call = group.call("train", 17)
        time.sleep(12)
        found = [find_group("policy")]
        (seen,) = look_at_groups(found, stuck_after_s=300.0)
        save("groups", draw_groups([seen]), 100)
        (seen,) = look_at_groups(found, stuck_after_s=10.0, dump=True)
        seen = with_usual_paths(seen)
        save("why", draw_findings(seen, diagnose(seen, stuck_after_s=10.0)), 100)
        save("stacks", draw_stacks(fold_stacks(seen.workers)), 100)
        call.cancel(force=True)
        os.close(os.open(pipe, os.O_RDWR))  # for which the hang waits
    ray.shutdown()


if __name__ == "__main__":
    main()
