# SPDX-License-Identifier: Apache-2.0
"""Healthy: joblib on Ray downloads pages slowly, because every call keeps to a rate limit."""

import time
import zlib

import joblib
from hangs import mark, start_ray
from ray.util.joblib import register_ray

TRUTH = {
    "hangs": False,
    "library": "joblib",
    "guilty": None,
    "function": "download",
    "note": "sleeps of 12 s between pages, 6 pages a call, 10 calls: about 6 minutes on 2 workers",
}


def fetch_page(source, page):
    return b"".join(b"%d,%d,%d\n" % (source, page, row) for row in range(20_000))


def download(source, pages, pause):
    sizes = []
    for page in range(pages):
        body = fetch_page(source, page)
        sizes.append(len(zlib.compress(body)))
        if source == 0 and page == 0:
            mark()
        time.sleep(pause)
    return sum(sizes)


if __name__ == "__main__":
    start_ray(num_cpus=2)
    register_ray()
    with joblib.parallel_backend("ray", n_jobs=2):
        sizes = joblib.Parallel(verbose=1)(joblib.delayed(download)(source, 6, 12.0) for source in range(10))
    print("bytes:", sum(sizes))
