# SPDX-License-Identifier: Apache-2.0
"""joblib on Ray: a worker wants to write into a SQLite file on which the driver holds an open transaction."""

import os
import sqlite3

import joblib
from hangs import mark, start_ray
from ray.util.joblib import register_ray

TRUTH = {
    "hangs": True,
    "library": "joblib on ray",
    "guilty": "pool actor that evaluates alpha 7, and the driver that holds the lock",
    "function": "evaluate",
    "note": "sqlite3 busy loop in C; the driver waits in Parallel with its transaction open",
}


def evaluate(alpha, path, driver):
    score = 1.0 - abs(alpha - 7) / 10
    if score == 1.0:
        database = sqlite3.connect(path, timeout=100_000)
        mark(pids=[driver])
        database.execute("UPDATE runs SET best = ?", (alpha,))
        database.commit()
    return score


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    register_ray()
    path = os.path.abspath("runs.sqlite")
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE runs (name TEXT, best REAL)")
    database.commit()
    database.execute("INSERT INTO runs VALUES ('first', 0)")
    with joblib.parallel_backend("ray", n_jobs=3):
        scores = joblib.Parallel()(joblib.delayed(evaluate)(alpha, path, os.getpid()) for alpha in range(12))
    database.commit()
    print(max(scores))
