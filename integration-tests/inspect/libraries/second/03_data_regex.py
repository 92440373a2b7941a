# SPDX-License-Identifier: Apache-2.0
"""One map_batches task backtracks exponentially in a regular expression on one long row."""

import re

import ray
import ray.data
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "data",
    "guilty": "map task of the block with the long row",
    "function": "is_title",
    "note": "busy in re.match, holds the GIL; a batch writer downstream waits",
}

TITLE = r"^(\w+\s?)*$"


def is_title(text):
    if len(text) > 60:
        mark()
        return re.match(TITLE, text) is not None
    return re.match(TITLE, text) is not None


def clean(batch):
    batch["title"] = batch["text"].map(is_title)
    return batch


def count_words(batch):
    batch["words"] = batch["text"].str.split().map(len)
    return batch[["id", "title", "words"]]


def make_rows():
    for number in range(4000):
        text = f"chapter {number % 40} of the book"
        if number == 2711:
            text = "transactions on the theory of distributed computing systems and networks, vol 12"
        yield {"id": number, "text": text}


if __name__ == "__main__":
    start_ray(num_cpus=4)
    rows = ray.data.from_items(list(make_rows()), override_num_blocks=8)
    cleaned = rows.map_batches(clean, batch_format="pandas", batch_size=100)
    counted = cleaned.map_batches(count_words, batch_format="pandas", batch_size=100, num_cpus=0.5)
    print(counted.sum("words"))
