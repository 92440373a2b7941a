# SPDX-License-Identifier: Apache-2.0
"""The search of the built documentation (`build/site`), run by node as by a browser."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SITE = Path(__file__).parent.parent / "build/site"
SEARCH = """
const [site, query] = process.argv.slice(1);
const read = (name) => require("fs").readFileSync(`${site}/${name}`, "utf8");
globalThis.document = {
  documentElement: { dataset: { content_root: "./" } }, getElementById: () => ({ firstChild: null }),
  addEventListener: () => {}, readyState: "loading",
};
Object.assign(globalThis, { window: globalThis, addEventListener: () => {}, location: { search: "" } });
globalThis.localStorage = { setItem: () => {} };
const scripts = ["documentation_options", "doctools", "language_data", "sphinx_highlight", "searchtools"];
const code = scripts.map((name) => read(`_static/${name}.js`)).join("\\n");
eval(`${code}
${read("searchindex.js")}
console.log(JSON.stringify(Search._performSearch(...Search._parseQuery(query)).map((result) => result[0])));`);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="the search of the site needs node")
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("restart", "docs/guides/survive-failures"),
        ("launch", "docs/guides/workergroup"),
        ("kill", "docs/guides/testing"),
        ("hang", "docs/guides/hung-jobs"),
    ],
)
def test_search(query, page):
    """A search for a word of the field finds the page about it first."""
    done = subprocess.run(["node", "-e", SEARCH, str(SITE), query], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # The last result is the best one.
    assert json.loads(done.stdout)[-1] == page
