# SPDX-License-Identifier: Apache-2.0
"""The built documentation (`build/site`): its search, run by node as by a browser, and its pages in Chromium."""

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


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
WIDTHS = [1280, 390]  # pixels of a laptop and of a phone
# Shows each page in a frame of each width, and replaces itself by a list of what cannot be read there.
LOOK = """
<iframe style="border: 0; height: 900px"></iframe>
<script>
const faults = [], frame = document.querySelector("iframe");
const left = PAGES.flatMap((page) => WIDTHS.map((width) => [page, width]));
function show() {
  if (left.length) [frame.src, frame.style.width] = [left[0][0], `${left[0][1]}px`];
  else document.body.textContent = JSON.stringify(faults);
}
frame.onload = () => {
  const [page, width] = left.shift(), text = frame.contentDocument, range = text.createRange();
  const report = (fault) => faults.push(`${page} at ${width} px: ${fault}`);
  if (text.documentElement.scrollWidth > width) report("wider than the window");
  for (const image of text.images) if (!image.naturalWidth) report(`no image ${image.src}`);
  const nodes = text.createTreeWalker(text.body, NodeFilter.SHOW_TEXT);
  while (nodes.nextNode())
    for (const word of nodes.currentNode.data.matchAll(/\\w+/g)) {
      if (!nodes.currentNode.parentElement.closest("article td, article th, h1, h2")) break;
      range.setStart(nodes.currentNode, word.index);
      range.setEnd(nodes.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((part) => part.top)).size > 1) report(`broken word ${word[0]}`);
    }
  show();
};
show();
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_pages_in_a_browser(tmp_path):
    """Each page fits the window of a laptop and of a phone, breaks no word in tables and titles, and has its images."""
    # The index of the root leads to that of the pages.
    pages = [page.as_uri() for page in sorted(SITE.rglob("*.html")) if page != SITE / "index.html"]
    look = tmp_path / "look.html"
    look.write_text(LOOK.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS)))
    command = [BROWSER, *OPTIONS, "--allow-file-access-from-files", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run([*command, look.as_uri()], capture_output=True, text=True, timeout=300)
    assert "<body>[]</body>" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]
