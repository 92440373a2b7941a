# SPDX-License-Identifier: Apache-2.0
"""Redacts credentials in everything that is printed, raised, written or hashed."""

import os
import re
from collections.abc import Iterable
from urllib.parse import unquote

REDACTED = "***"
# A user without a password may be a token, so `git` in `git+ssh://git@host` is redacted, too. A password may have an @.
USERINFO = re.compile(r"([a-z][a-z0-9+.-]*://)([^/\s?#\"']+)@", re.IGNORECASE)
PARAMETER = re.compile(r"([?&]([^=&\s]+)=)[^&\s\"']+")
# Whole words: TOKENIZERS_PARALLELISM and MAX_TOKENS are settings.
SECRET_NAME = re.compile(
    r"(?<![A-Z0-9])(API_?KEY|(AWS)?(ACCESS|PRIVATE)_?KEY(ID)?|CREDENTIALS?|PASS(WORD|PHRASE|WD)|SECRET|SIG(NATURE)?"
    r"|TOKEN|USERNAME|AUTH$)(?![A-Z0-9])"
)


def is_secret_name(name: str) -> bool:
    """Return whether a variable or a parameter of a URL of this name holds a credential."""
    return SECRET_NAME.search(name.upper().replace("-", "_")) is not None


def find_credentials(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the users and passwords in URLs, in the order of the texts."""
    return tuple(dict.fromkeys(match[2] for text in texts for match in USERINFO.finditer(text)))


def find_secrets(texts: Iterable[str]) -> frozenset[str]:
    """Return the credentials in URLs, in every spelling in which a program may print them."""
    secrets: set[str] = set()
    for credential in find_credentials(texts):
        user, _, password = credential.partition(":")
        # A user name with a password is not a secret: a name such as `git` is also a common word.
        secrets |= {credential, password or user, unquote(credential), unquote(password or user)}
    return frozenset(secret for secret in secrets if len(secret) > 3)


def ambient_secrets() -> frozenset[str]:
    """Return the credentials in the variables of this process that uv reads."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("UV_") or "PROXY" in name.upper()}
    named = {value for name, value in ours.items() if is_secret_name(name) and len(value) > 3}
    return frozenset(named) | find_secrets(ours.values())


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without the credentials in its URLs, and without the given secrets."""
    text = USERINFO.sub(rf"\1{REDACTED}@", text)
    text = PARAMETER.sub(lambda match: f"{match[1]}{REDACTED}" if is_secret_name(match[2]) else match[0], text)
    for secret in sorted(secrets, key=len, reverse=True):  # the longest first: one may be a part of another
        text = text.replace(secret, REDACTED)
    return text
