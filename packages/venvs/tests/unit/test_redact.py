# SPDX-License-Identifier: Apache-2.0
"""Credentials are recognised, counted by a digest, and redacted."""

import pytest

from fairlead_venvs import VenvSpec
from fairlead_venvs._node.redact import ambient_secrets, find_secrets, is_secret_name, redact

USER, PASSWORD = "reader", "hun%40ter2-s3cret"


HIDDEN = ("hun%40ter2-s3cret", "hun@ter2-s3cret")


def hidden_in(text):
    return [secret for secret in HIDDEN if secret in text]


def test_misuse_does_not_tell():
    """The error of a refused spec has no credentials."""
    url = f"https://{USER}:{PASSWORD}@127.0.0.1:9/simple"
    for fields in (
        {"command": f"uv run --unknown={url}"},
        {"requirements": [f"a b c {url}"]},
        {"requirements": [], "find_links": [f"{url},x"]},
        {"requirements": url},
        {"command": f"uv run --index {url}"},
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            VenvSpec(**fields)
        assert not hidden_in(str(caught.value))


def test_redaction(monkeypatch):
    """Users and passwords in URLs, tokens in queries, and credentials in variables are redacted."""
    text = "https://u:p%40ss@h/x git+ssh://git@h/y p@ss https://h/?token=abc&z=1 http://h:80/a@b"
    secrets = find_secrets([text])
    assert redact(text, secrets) == "https://***@h/x git+ssh://***@h/y *** https://h/?token=***&z=1 http://h:80/a@b"
    monkeypatch.setenv("UV_INDEX_MINE_PASSWORD", "opensesame")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:mellon@proxy:1")
    assert redact("opensesame, mellon", ambient_secrets()) == "***, ***"


def test_names_of_secrets():
    """A whole word in its name makes a variable secret. Settings with similar names are not secret."""
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
    """A variable whose name only resembles that of a secret counts and is shown."""
    parallel, serial = (VenvSpec(requirements=[], env={"TOKENIZERS_PARALLELISM": value}) for value in ("true", "false"))
    assert parallel.fingerprint() != serial.fingerprint()
    assert "'TOKENIZERS_PARALLELISM': 'true'" in repr(parallel)


def test_secrets_do_not_count():
    """A secret of the setup command belongs into env. It is not shown, and another one is not another environment."""
    one, other = (VenvSpec(requirements=[], env={"HF_TOKEN": value}) for value in ("hf_one", "hf_other"))
    assert one.fingerprint() == other.fingerprint()
    assert "hf_one" not in repr(one)


def test_signed_urls():
    """The credentials of a signed URL are redacted; the rest of its query stays readable."""
    url = (
        "https://h/x.whl?X-Amz-Date=20260101&X-Amz-Signature=abc&X-Amz-Credential=me%2Fx&X-Amz-Security-Token=def"
        "&AWSAccessKeyId=ghi&sig=jkl&max_tokens=5"
    )
    assert redact(url) == (
        "https://h/x.whl?X-Amz-Date=20260101&X-Amz-Signature=***&X-Amz-Credential=***&X-Amz-Security-Token=***"
        "&AWSAccessKeyId=***&sig=***&max_tokens=5"
    )
