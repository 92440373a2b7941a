# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of the guide "Rollouts" with the code that it shows: `nox -s pictures`."""

import contextlib
import heapq
import io
import random
from pathlib import Path

from rich.console import Console

from fairlead_rollouts import Claim, IndexStream, Ledger, LedgerConfig, Ref

PICTURE = Path(__file__).parent / "pictures" / "ledger.svg"


def run(steps: int) -> Ledger:
    """Train on a pretended clock; one prompt in ten takes long, and every twentieth group has no signal."""
    config = LedgerConfig(group_size=4, groups_per_version=8, max_staleness=2)
    ledger, draw, now, running = Ledger(config, IndexStream(500, seed=0), checkpoints=False), random.Random(0), 0.0, []
    step = 1
    while step <= steps:
        for lease in ledger.lease(max(1, ledger.room())):
            slow = draw.random() < 0.1
            heapq.heappush(
                running, (now + draw.randint(20, 40) if slow else now + draw.randint(1, 3), lease.token, lease)
            )
        claim = ledger.claim(step, 8)
        if isinstance(claim, Claim):
            ledger.drop([group.prompt_id for group in claim.groups if group.prompt_id % 20 == 0], "no_signal")
            ledger.advance(step, trained=step)
            now, step = now + 4, step + 1
        else:
            now, _, lease = heapq.heappop(running)
            ledger.finish_many([(lease, sample, Ref(sample)) for sample in lease.samples])
    return ledger


def main() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run(20).show()
    console = Console(record=True, width=108, file=io.StringIO(), highlight=False)
    console.print(printed.getvalue(), markup=False)
    console.save_svg(str(PICTURE), title="ledger.show()", unique_id="ledger")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
