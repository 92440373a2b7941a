# SPDX-License-Identifier: Apache-2.0
"""Credentials are recognised and redacted."""

import pytest

from fairlead_venvs import VenvSpec
from fairlead_venvs._node.uv import is_secret_name, redact

URL = "https://reader:s3cret@127.0.0.1:9/simple"


@pytest.mark.parametrize(
    "fields",
    [
        {"command": f"uv run --unknown={URL}"},
        {"command": f"uv run --index {URL}"},
        {"requirements": [f"a b c {URL}"]},
        {"requirements": URL},
    ],
)
def test_misuse_does_not_tell(fields):
    """The error of a refused spec has no credentials."""
    with pytest.raises((ValueError, TypeError)) as caught:
        VenvSpec(**fields)
    assert "s3cret" not in str(caught.value)


def test_redaction():
    """Users and passwords in URLs, tokens in queries, and given secrets are redacted."""
    text = "https://u:p%40ss@h/x git+ssh://git@h/y mellon https://h/?token=abc&z=1 http://h:80/a@b"
    expected = "https://***@h/x git+ssh://***@h/y *** https://h/?token=***&z=1 http://h:80/a@b"
    assert redact(text, ["mellon"]) == expected
    text = "?X-Amz-Date=1&X-Amz-Signature=abc&X-Amz-Credential=me%2Fx&AWSAccessKeyId=ghi&sig=jkl#sha256=0&max_tokens=5"
    expected = "?X-Amz-Date=1&X-Amz-Signature=***&X-Amz-Credential=***&AWSAccessKeyId=***&sig=***#sha256=0&max_tokens=5"
    assert redact(text) == expected


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


def test_settings_count():
    """A secret of the setup command is not shown and does not count; a variable whose name resembles one does."""
    one, other = (VenvSpec(requirements=[], env={"HF_TOKEN": value}) for value in ("hf_one", "hf_other"))
    assert one.fingerprint() == other.fingerprint()
    assert "hf_one" not in repr(one)
    parallel, serial = (VenvSpec(requirements=[], env={"TOKENIZERS_PARALLELISM": value}) for value in ("true", "false"))
    assert parallel.fingerprint() != serial.fingerprint()
    assert "'TOKENIZERS_PARALLELISM': 'true'" in repr(parallel)
