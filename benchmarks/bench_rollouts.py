# SPDX-License-Identifier: Apache-2.0
"""The ledger of rollouts: the cost of a sample's life, of claims and checkpoints, and the memory that it takes."""

import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

from _measure import Row, Timing, table, under

from fairlead_rollouts import Claim, IndexStream, Ledger, LedgerConfig, Ref
from fairlead_rollouts._file import SnapshotFile

SIBLINGS = 8
REFS = [Ref(f"store/payload-{sample}", durable=True) for sample in range(SIBLINGS)]


def make(places: int, file: Path | None = None) -> Ledger:
    config = LedgerConfig(group_size=SIBLINGS, groups_per_version=places, max_staleness=1)
    return Ledger(config, IndexStream(1_000_000, seed=0), file=file)


def live(ledger: Ledger, steps: int, folder: Path) -> float:
    """Return the CPU seconds of each sample, from its lease to the commit of its step."""
    places = ledger.config.groups_per_version
    began, first = time.process_time(), ledger.version
    for step in range(first + 1, first + 1 + steps):
        for lease in ledger.lease(places):
            for sample in lease.samples:
                ledger.finish(lease, sample, REFS[sample])
        assert isinstance(ledger.claim(step, places), Claim)
        ledger.advance(step, trained=step)
        if step % 10 == 0:
            ledger.prepare(step, folder)
            ledger.commit(step)
    return (time.process_time() - began) / (steps * places * SIBLINGS)


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from _life_rows(folder)
        yield from _size_rows(folder)


def _life_rows(folder: Path) -> Iterator[Row]:
    plain: list[float] = []
    double: list[float] = []
    filed: list[float] = []
    ledgers = make(64), make(128), make(64, folder / "ledger")
    for _ in range(7):
        for ledger, seconds, steps in zip(ledgers, (plain, double, filed), (40, 20, 40), strict=True):
            seconds.append(live(ledger, steps, folder))
    ledgers[2].close()
    base = Timing.of(plain)
    rate = 1 / base.median
    what = "life of a sample, groups of 8: lease, finish, claim, prepare, commit"
    yield under(what, f"{base}: {rate:,.0f}/s", base.median, 10e-6)
    ratio = Timing.of(double).median / base.median
    yield Row("  with twice as many open groups", f"{Timing.of(double)}: {ratio:.2f}x", "<= 1.2x", ratio <= 1.2)
    ratio = Timing.of(filed).median / base.median
    yield Row("  with a file", f"{Timing.of(filed)}: {ratio:.2f}x", "<= 1.6x", ratio <= 1.6)


def _size_rows(folder: Path) -> Iterator[Row]:
    ledger = make(4096)
    tracemalloc.start()
    for lease in ledger.lease(8192):
        for sample in lease.samples:
            ledger.finish(lease, sample, REFS[sample])
    size = tracemalloc.get_traced_memory()[0] / 8192
    tracemalloc.stop()
    yield Row("memory of an open group of 8", f"{size / 1000:.1f} kB", "<= 4 kB", size <= 4000)
    claims: list[float] = []
    prepares: list[float] = []
    restores: list[float] = []
    for step in range(1, 8):
        began = time.perf_counter()
        taken = ledger.claim(step, 512)
        claims.append(time.perf_counter() - began)
        assert isinstance(taken, Claim)
        ledger.drop([group.prompt_id for group in taken.groups], "measured")
        for lease in ledger.lease(512):
            ledger.finish_many([(lease, sample, REFS[sample]) for sample in lease.samples])
    claim = Timing.of(claims)
    yield under("claim of 512 groups from 8,192 finished", str(claim), claim.median, 0.01)
    small = make(1024)
    for lease in small.lease(1250):
        for sample in lease.samples:
            small.finish(lease, sample, REFS[sample])
    tracemalloc.start()
    began_at = Ledger.begin(small.config, IndexStream(2_000_000, seed=0), step=1, version=1, prompt_id=1_000_000)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert began_at.statistics().applied == 1_000_000
    yield Row("memory of 1,000,000 settled", f"{memory / 1e6:.2f} MB", "<= 2 MB", memory <= 2e6)
    for _ in range(7):
        began = time.perf_counter()
        small.prepare(0, folder)
        prepares.append(time.perf_counter() - began)
        began = time.perf_counter()
        Ledger.restore(small.config, IndexStream(1_000_000, seed=0), step=0, version=0, directory=folder)
        restores.append(time.perf_counter() - began)
    background, held = _measure_file(small, folder)
    prepare, restore = Timing.of(prepares), Timing.of(restores)
    yield under("prepare with 10,000 open samples, with its fsync", str(prepare), prepare.median, 0.1)
    written = Timing.of(background)
    yield under("a snapshot of them in the background", str(written), written.median, 0.15)
    yield Row("  the longest call meanwhile, of 7 snapshots", f"{held * 1000:.1f} ms", "<= 20 ms", held <= 0.02)
    yield under("  restore them", str(restore), restore.median, 0.5)


def _measure_file(ledger: Ledger, folder: Path) -> tuple[list[float], float]:
    """Return the seconds of snapshots that a thread writes, and the longest call of another thread beside them."""
    file = SnapshotFile(folder / "background")
    ledger._book.callbacks.file = file
    file.begin(lambda: ledger._take_snapshot(None), ledger._lock)
    seconds: list[float] = []
    longest = 0.0

    def save() -> None:
        began = time.perf_counter()
        file.save()
        seconds.append(time.perf_counter() - began)

    for _ in range(7):
        thread = threading.Thread(target=save)
        thread.start()
        while thread.is_alive():
            began = time.perf_counter()
            ledger.evict()
            longest = max(longest, time.perf_counter() - began)
        thread.join()
    file.close()
    return seconds, longest


if __name__ == "__main__":
    print(table(list(rows())))
