# SPDX-License-Identifier: Apache-2.0
"""Credentials in the URL of an index are used, and appear nowhere."""

import base64
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fairlead_venvs import VenvBuildError, VenvSpec, create_local_venv
from fairlead_venvs._progress import Bars
from fairlead_venvs._redact import ambient_secrets, redacted, secrets_of

USER, PASSWORD = "reader", "hun%40ter2-s3cret"
HIDDEN = ("hun%40ter2-s3cret", "hun@ter2-s3cret")


class Guarded(SimpleHTTPRequestHandler):
    """An index that wants a password."""

    def do_GET(self):
        wanted = base64.b64encode(f"{USER}:{HIDDEN[1]}".encode()).decode()
        if self.headers.get("Authorization") == f"Basic {wanted}":
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


@pytest.mark.parametrize("way", ["index", "requirement", "variable"])
def test_nowhere(index, way, root, capfd, monkeypatch):
    """What is installed with a password leaves it in no file, no output, no text of a spec, and no fingerprint."""
    shown = []
    monkeypatch.setattr(Bars, "update", lambda self, *told: shown.append(str(told)))

    def spec(password, *requirements):
        url = f"http://{USER}:{password}@{index}/simple"
        if way == "index":
            return VenvSpec(requirements=requirements, index=url)
        if way == "variable":
            return VenvSpec(requirements=requirements, env={"UV_DEFAULT_INDEX": url, "OTHER_TOKEN": password})
        at = f"omega @ {url}/omega/omega-1.0-py3-none-any.whl"
        return VenvSpec(requirements=[at if one == "omega" else one for one in requirements], no_index=True)

    ready = spec(PASSWORD, "omega")
    python = create_local_venv(ready)
    with pytest.raises(VenvBuildError) as caught:
        create_local_venv(spec(PASSWORD, "omega", "not-there-at-all"))

    written = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(written) > 5
    assert [path for path in written if hidden_in(path.read_text(errors="replace"))] == []
    assert not hidden_in("".join(map(str, root.rglob("*"))))
    assert not hidden_in(str(caught.value) + repr(caught.value) + repr(ready) + "".join(capfd.readouterr()))
    assert not hidden_in("".join(shown))
    # Somebody with another password means the same environment.
    assert spec("another", "omega").fingerprint() == ready.fingerprint()
    assert create_local_venv(spec("another", "omega")) == python


def test_misuse_does_not_tell(index):
    """Nor is it in what is refused."""
    url = f"https://{USER}:{PASSWORD}@{index}/simple"
    for fields in (
        {"command": f"uv run --default-index {url} --unknown={url}"},
        {"requirements": [f"a b c {url}"]},
        {"requirements": [], "find_links": [f"{url},x"]},
        {"requirements": url},
        {"command": f"uv run --index {url}"},
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            VenvSpec(**fields)
        assert not hidden_in(str(caught.value))


def test_redaction(monkeypatch):
    """Users and passwords in any URL, in either spelling, tokens in its query, and what variables hold."""
    text = "https://u:p%40ss@h/x git+ssh://git@h/y p@ss https://h/?token=abc&z=1 http://h:80/a@b"
    secrets = secrets_of([text])
    assert redacted(text, secrets) == "https://***@h/x git+ssh://***@h/y *** https://h/?token=***&z=1 http://h:80/a@b"
    monkeypatch.setenv("UV_INDEX_MINE_PASSWORD", "opensesame")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:mellon@proxy:1")
    assert redacted("opensesame, mellon", ambient_secrets()) == "***, ***"


def test_project(make_project, project_spec, root):
    """A project may name its index in its pyproject: the copy that a build makes of it is gone with the build."""
    folder = make_project(more=f'[[tool.uv.index]]\nurl = "https://{USER}:{PASSWORD}@localhost/simple"\n', lock=True)
    spec = project_spec(folder)
    python = create_local_venv(spec)
    left = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and path.suffix != ".whl"]
    assert [path for path in left if hidden_in(path.read_text(errors="replace"))] == []
    # Somebody with another password means the same environment, here, too.
    pyproject = folder / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace(PASSWORD, "another"))
    assert create_local_venv(spec) == python
