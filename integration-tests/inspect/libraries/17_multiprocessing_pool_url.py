# SPDX-License-Identifier: Apache-2.0
"""ray.util.multiprocessing.Pool maps a download over 20 addresses; one server accepts and never answers."""

import subprocess
import sys
import urllib.request

from hangs import mark, start_ray
from ray.util.multiprocessing import Pool

TRUTH = {
    "hangs": True,
    "library": "ray.util.multiprocessing",
    "guilty": "pool actor that downloads item 13",
    "function": "download",
    "note": "urllib.request.urlopen without timeout, in recv of the status line",
}

SERVER = """
import http.server, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/13":
            threading.Event().wait()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x" * 1000)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def download(address):
    if address.endswith("/13"):
        mark()
    with urllib.request.urlopen(address) as reply:
        return len(reply.read())


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    port = int(server.stdout.readline())
    with Pool(processes=3) as pool:
        print(sum(pool.map(download, [f"http://127.0.0.1:{port}/{i}" for i in range(20)], chunksize=2)))
