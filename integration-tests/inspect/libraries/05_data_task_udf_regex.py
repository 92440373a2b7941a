# SPDX-License-Identifier: Apache-2.0
"""A Data task UDF runs a regular expression with catastrophic backtracking on one bad row."""

import re

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "data",
    "guilty": "task worker of map(parse)",
    "function": "parse",
    "note": "stuck inside re.match in C with the GIL held, at 100 % CPU",
}

PATTERN = re.compile(r"^(\w+\s?)*$")


def parse(row):
    text = "the quick brown fox " * 2 if row["id"] != 333 else "a" * 60 + "!"
    if row["id"] == 333:
        mark()
    row["clean"] = PATTERN.match(text) is not None
    return row


if __name__ == "__main__":
    start_ray(num_cpus=2, object_store_memory=400_000_000)
    rows = ray.data.range(600, override_num_blocks=6).map(parse)
    print(rows.filter(lambda row: row["clean"]).count())
