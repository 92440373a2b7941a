# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the README and of the guide about hung jobs, from real hangs: `nox -s pictures`.

Process ids, node ids and addresses are those of the machine that draws.
"""

import io
import os
import re
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
from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup

FOLDER = Path(__file__).parent / "pictures"
# Where the packages and this program are on this machine, and where they would be.
INSTALLED = {
    str(Path(__file__).parent): "/home/me",
    sys.executable: "python",
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


def read_terminal(command: list[str], width: int, **variables: str) -> str:
    """Return what a command prints on a terminal, with the paths of packages as they usually are."""
    ours, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (60, width))
    env = {**os.environ, "TERM": "xterm-256color", **variables}
    for variable in ("COLUMNS", "NO_COLOR"):
        env.pop(variable, None)
    with os.fdopen(ours, "rb", buffering=0) as printed:
        subprocess.run(command, cwd=FOLDER.parents[1], env=env, stdout=terminal, stderr=subprocess.DEVNULL, check=False)
        text = printed.read(65536).decode().replace("\r\n", "\n")  # all of it fits into the terminal's buffer
    os.close(terminal)
    for here, there in INSTALLED.items():
        text = text.replace(here, there)
    return text


def draw_hung_job(example: str, name: str) -> None:
    """Draw what the command prints about an example that hangs and does not use Fairlead."""
    text = read_terminal([sys.executable, example, "--why"], 104)
    # The last snapshot is the one that names the cause.
    shown = re.split(r"^.* UTC$", text, flags=re.MULTILINE)[-1].replace(" --why", "")
    save(name, Text.from_ansi(shown.strip()), 104, "why")


def draw_group() -> None:
    """Draw what `why` prints about a group of Fairlead, of which one worker hangs."""
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
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", "fairlead_inspect", "why", "--after", "10", "--timeout", "60"]
        save("why", Text.from_ansi(read_terminal(command, 140, RAY_ADDRESS=address).strip()), 140)
        call.cancel(force=True)
        os.close(os.open(pipe, os.O_RDWR))  # for which the hang waits
    ray.shutdown()


def main() -> None:
    draw_hung_job("examples/hung_job.py", "hung-job")
    draw_hung_job("examples/hung_ray_train.py", "hung-ray-train")
    draw_group()


if __name__ == "__main__":
    main()
