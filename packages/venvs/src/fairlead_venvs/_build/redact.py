# SPDX-License-Identifier: Apache-2.0
"""Redacts credentials in everything that is printed, raised, written or hashed."""

import itertools
import os
import re
from collections.abc import Iterable
from urllib.parse import unquote

REDACTED = "***"
# A user without a password may be a token, so `git` in `git+ssh://git@host` is redacted, too. A password may have an @.
USERINFO = r"([a-z][a-z0-9+.-]*://)([^/\s?#]+)@"
QUERY = r"([?&]([^=&\s]+)=)[^&\s]+"
# Parameters of a URL's query, among them those of a signed URL that grant access.
QUERY_NAMES = frozenset({"awsaccesskeyid", "key", "sig"})
QUERY_WORDS = frozenset({"CREDENTIAL", "SIGNATURE"})
# Whole words: TOKENIZERS_PARALLELISM and MAX_TOKENS are settings.
SECRET_WORDS = frozenset(
    {"APIKEY", "CREDENTIAL", "CREDENTIALS", "PASSPHRASE", "PASSWD", "PASSWORD", "SECRET", "TOKEN", "USERNAME"}
)
SECRET_PAIRS = frozenset({("ACCESS", "KEY"), ("API", "KEY"), ("PRIVATE", "KEY")})


def is_secret_name(name: str) -> bool:
    """Return whether a variable or option of this name holds a credential."""
    words = re.findall(r"[A-Z0-9]+", name.upper())
    pairs = set(itertools.pairwise(words))
    return not SECRET_WORDS.isdisjoint(words) or not SECRET_PAIRS.isdisjoint(pairs) or words[-1:] == ["AUTH"]


def find_secrets(texts: Iterable[str]) -> frozenset[str]:
    """Return the credentials in URLs, in every spelling in which a program may print them."""
    found: set[str] = set()
    for text in texts:
        for match in re.finditer(USERINFO, text, flags=re.IGNORECASE):
            user, _, password = match[2].partition(":")
            # A user name with a password is not a secret: a name such as `git` is also a common word.
            hidden = password or user
            found |= {match[2], hidden, unquote(match[2]), unquote(hidden)}
    return frozenset(one for one in found if len(one) > 3)


def ambient_secrets() -> frozenset[str]:
    """Return the credentials in the variables of this process that uv reads."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("UV_") or "PROXY" in name.upper()}
    named = {value for name, value in ours.items() if is_secret_name(name) and len(value) > 3}
    return frozenset(named) | find_secrets(ours.values())


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without the credentials in its URLs, and without the given secrets."""
    text = re.sub(USERINFO, rf"\1{REDACTED}@", text, flags=re.IGNORECASE)
    text = re.sub(QUERY, _redact_parameter, text)
    for secret in sorted(secrets, key=len, reverse=True):  # the longest first: one may be a part of another
        text = text.replace(secret, REDACTED)
    return text


def _redact_parameter(match: re.Match[str]) -> str:
    name = match[2]
    words = re.findall(r"[A-Z0-9]+", name.upper())
    secret = is_secret_name(name) or name.lower() in QUERY_NAMES or not QUERY_WORDS.isdisjoint(words)
    return f"{match[1]}{REDACTED}" if secret else match[0]
