# SPDX-License-Identifier: Apache-2.0
"""Credentials in the URL of an index are used, and appear nowhere."""

import base64
import hashlib
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fairlead_venvs import VenvBuildError, VenvSpec, create_local_venv
from fairlead_venvs._build.redact import ambient_secrets, is_secret_name, redacted, secret_digest, secrets_of
from fairlead_venvs._progress import Bars

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
            credentials = {"UV_INDEX_MINE_USERNAME": USER, "UV_INDEX_MINE_PASSWORD": password}
            return VenvSpec(requirements=requirements, env={"UV_DEFAULT_INDEX": url, **credentials})
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


def test_names_of_secrets():
    """A variable is secret by a whole word of its name: settings that only sound like one are no secrets."""
    secret = (
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "OPENAI_API_KEY",
        "UV_INDEX_MINE_PASSWORD",
        "NPM_CONFIG__AUTH",
        "token",
    )
    assert [name for name in secret if not is_secret_name(name)] == []
    settings = ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "SECRETARY", "KEY_COUNT", "AUTHOR", "UV_LINK_MODE", "_", "")
    assert [name for name in settings if is_secret_name(name)] == []


def test_settings_count_and_are_shown():
    """Specs that differ in a variable whose name only sounds secret are different, and say so."""
    parallel, serial = (VenvSpec(requirements=[], env={"TOKENIZERS_PARALLELISM": value}) for value in ("true", "false"))
    assert parallel.fingerprint() != serial.fingerprint()
    assert "'TOKENIZERS_PARALLELISM': 'true'" in repr(parallel)


def test_secrets_count():
    """A secret that the setup command may use decides the content: its digest counts, and is not its plain hash."""
    one, same, other = (VenvSpec(requirements=[], env={"HF_TOKEN": value}) for value in ("hf_1", "hf_1", "hf_2"))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert secret_digest("HF_TOKEN", "hf_1") != secret_digest("OTHER_TOKEN", "hf_1")
    assert "hf_1" not in repr(one)


def test_digests_are_made_once(monkeypatch):
    """A digest is expensive on purpose: a process makes it once for a secret, however often it plans."""
    made = []
    scrypt = hashlib.scrypt
    monkeypatch.setattr(hashlib, "scrypt", lambda *args, **options: made.append(args) or scrypt(*args, **options))
    spec = VenvSpec(
        requirements=[], env={"HF_TOKEN": "hf_digests_are_made_once"}, setup=["true", "--token", "once-only"]
    )
    assert spec.fingerprint() == spec.fingerprint()
    assert len(made) == 2


def test_setup_hides_its_secrets(root):
    """Credentials in the setup command are used, count, and are shown nowhere."""
    setup = ["sh", "-c", "echo $0 $1 $2 $3 TOKEN=opensesame; exit 3", "--password", "mellon-1", "https://u:speak-2@h/"]

    def spec(password):
        return VenvSpec(requirements=[], setup=[*setup[:4], password, *setup[5:]])

    with pytest.raises(VenvBuildError) as caught:
        create_local_venv(spec("mellon-1"))
    shown = str(caught.value) + repr(spec("mellon-1"))
    assert [secret for secret in ("opensesame", "mellon-1", "speak-2") if secret in shown] == []
    assert "TOKEN=***" in shown
    assert spec("mellon-1").fingerprint() != spec("mellon-2").fingerprint()


def test_signed_urls():
    """What lets the holder of a signed URL in is redacted; the rest of its query stays readable."""
    url = (
        "https://h/x.whl?X-Amz-Date=20260101&X-Amz-Signature=abc&X-Amz-Credential=me%2Fx&X-Amz-Security-Token=def"
        "&AWSAccessKeyId=ghi&sig=jkl&max_tokens=5"
    )
    assert redacted(url) == (
        "https://h/x.whl?X-Amz-Date=20260101&X-Amz-Signature=***&X-Amz-Credential=***&X-Amz-Security-Token=***"
        "&AWSAccessKeyId=***&sig=***&max_tokens=5"
    )
