# SPDX-License-Identifier: Apache-2.0
"""Credentials are blotted out of everything that is printed, raised, written or hashed."""

import os
import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

__all__ = ["ambient_secrets", "is_secret_name", "redacted", "secrets_of"]

BLOT = "***"
# A user without a password may be a token. Not a lone @ further on: `git+ssh://git@host` has nothing to hide, but
# whether it has cannot be seen. A password may itself hold an @.
USERINFO = r"([a-z][a-z0-9+.-]*://)([^/\s?#]+)@"
QUERY = r"([?&](?:access_token|token|password|passwd|key|api_key|secret|sig|signature)=)[^&\s]+"
SECRET_NAME = r"PASSWORD|PASSWD|TOKEN|SECRET|USERNAME|CREDENTIAL|API_KEY|ACCESS_KEY|_AUTH$"


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a credential."""
    return re.search(SECRET_NAME, name.upper()) is not None


def secrets_of(texts: Iterable[str]) -> frozenset[str]:
    """The credentials in URLs, in every spelling in which a program may print them."""
    found: set[str] = set()
    for text in texts:
        for match in re.finditer(USERINFO, text, flags=re.IGNORECASE):
            user, _, password = match[2].partition(":")
            # A user name with a password is no secret, and blotting out `git` everywhere would spoil messages.
            hidden = password or user
            found |= {match[2], hidden, unquote(match[2]), unquote(hidden)}
    return frozenset(one for one in found if len(one) > 3)


def ambient_secrets(env: Mapping[str, str] | None = None) -> frozenset[str]:
    """The credentials that uv finds in a process's variables."""
    variables = os.environ if env is None else env
    ours = {name: value for name, value in variables.items() if name.startswith("UV_") or "PROXY" in name.upper()}
    named = {value for name, value in ours.items() if is_secret_name(name) and len(value) > 3}
    return frozenset(named) | secrets_of(ours.values())


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """The text without credentials: those in any URL, and the given ones wherever they stand."""
    text = re.sub(USERINFO, rf"\1{BLOT}@", text, flags=re.IGNORECASE)
    text = re.sub(QUERY, rf"\1{BLOT}", text, flags=re.IGNORECASE)
    for secret in sorted(secrets, key=len, reverse=True):  # the longest first: one may be a part of another
        text = text.replace(secret, BLOT)
    return text
