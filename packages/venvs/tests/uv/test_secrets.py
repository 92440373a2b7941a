# SPDX-License-Identifier: Apache-2.0
"""Credentials in the URL of an index are used, and appear nowhere."""

import base64
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fairlead_venvs import VenvBuildError, VenvSpec, create_local_venv

USER, PASSWORD = "reader", "hun%40ter2-s3cret"
HIDDEN = ("hun%40ter2-s3cret", "hun@ter2-s3cret")


class Guarded(SimpleHTTPRequestHandler):
    """An index that requires a password."""

    def do_GET(self):
        wanted = base64.b64encode(f"{USER}:{HIDDEN[1]}".encode()).decode()
        if self.headers.get("Authorization") == f"Basic {wanted}" or self.path.endswith(f"?z=1&sig={PASSWORD}"):
            return super().do_GET()
        self.send_response(401)
        self.send_header("WWW-Authenticate", "Basic")
        self.end_headers()
        return None

    def log_message(self, *_):
        """Not in the tests' output."""


@pytest.fixture
def index(tools, tmp_path):
    """Host and port of an index with one package."""
    folder = tmp_path / "index" / "simple" / "omega"
    folder.mkdir(parents=True)
    wheel = tools.make_wheel(folder, "omega")
    (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Guarded, directory=str(tmp_path / "index")))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def hidden_in(text):
    return [secret for secret in HIDDEN if secret in text]


@pytest.mark.parametrize("way", ["index", "requirement", "raw", "signed", "variable"])
def test_nowhere(index, way, root, capfd, caplog):
    """A password of an index is in no file, no output, no text of a spec, and no fingerprint."""
    caplog.set_level("INFO")

    def spec(password, *requirements):
        url = f"http://{USER}:{password}@{index}/simple"
        if way == "index":
            return VenvSpec(requirements=requirements, index=url)
        if way == "variable":
            credentials = {"UV_INDEX_MINE_USERNAME": USER, "UV_INDEX_MINE_PASSWORD": password}
            return VenvSpec(requirements=requirements, env={"UV_DEFAULT_INDEX": url, **credentials})
        file = "omega/omega-1.0-py3-none-any.whl"
        at = f"omega @ {url if way == 'requirement' else url.replace('%40', '@')}/{file}"
        if way == "signed":
            at = f"omega @ http://{index}/simple/{file}?z=1&sig={password}"
        return VenvSpec(requirements=[at if one == "omega" else one for one in requirements], no_index=True)

    ready = spec(PASSWORD, "omega")
    python = create_local_venv(ready)
    with pytest.raises(VenvBuildError) as caught:
        create_local_venv(spec(PASSWORD, "omega", "not-there-at-all"))

    # uv itself writes the whole query of a URL into `direct_url.json`.
    uvs = "direct_url.json" if way == "signed" else ""
    written = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and path.name != uvs]
    assert len(written) > 5
    assert [path for path in written if hidden_in(path.read_text(errors="replace"))] == []
    assert not hidden_in("".join(map(str, root.rglob("*"))))
    assert not hidden_in(str(caught.value) + repr(caught.value) + repr(ready) + "".join(capfd.readouterr()))
    assert "uv pip compile" in caplog.text
    assert not hidden_in(caplog.text)
    # Another password gives the same environment.
    assert spec("another", "omega").fingerprint() == ready.fingerprint()
    assert create_local_venv(spec("another", "omega")) == python


def test_project(make_project, project_spec, root):
    """A project may name its index in its pyproject: only source distributions of the project contain it."""
    folder = make_project(more=f'[[tool.uv.index]]\nurl = "https://{USER}:{PASSWORD}@localhost/simple"\n', lock=True)
    create_local_venv(project_spec(folder))
    spec = project_spec(folder, install_project=False)
    python = create_local_venv(spec)
    left = [
        path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and not path.name.endswith(".gz")
    ]
    assert [path for path in left if hidden_in(path.read_text(errors="replace"))] == []
    # Another password gives the same environment.
    pyproject = folder / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace(PASSWORD, "another"))
    assert create_local_venv(spec) == python


def test_secrets_of_the_setup(root):
    """The setup command gets a secret by a variable; what it prints is redacted."""
    setup = ["sh", "-c", "echo token $HF_TOKEN; exit 3"]
    with pytest.raises(VenvBuildError) as caught:
        create_local_venv(VenvSpec(requirements=[], setup=setup, env={"HF_TOKEN": "opensesame"}))
    assert "token ***" in str(caught.value)
    assert "opensesame" not in str(caught.value)
