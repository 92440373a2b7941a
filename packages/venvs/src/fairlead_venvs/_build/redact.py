# SPDX-License-Identifier: Apache-2.0
"""Redacts credentials in everything that is printed, raised, written or hashed."""

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

__all__ = ["ambient_secrets", "is_secret_name", "redacted", "secret_digest", "secrets_of", "secrets_of_command"]

BLOT = "***"
# A user without a password may be a token. Not a lone @ further on: `git+ssh://git@host` has nothing to hide, but
# whether it has cannot be seen. A password may itself hold an @.
USERINFO = r"([a-z][a-z0-9+.-]*://)([^/\s?#]+)@"
QUERY = r"([?&]([^=&\s]+)=)[^&\s]+"
# Of a URL's query: also the parts of a signed URL that let its holder in.
QUERY_NAMES = frozenset({"awsaccesskeyid", "key", "sig"})
QUERY_WORDS = frozenset({"CREDENTIAL", "SIGNATURE"})
# Whole words: TOKENIZERS_PARALLELISM and MAX_TOKENS are settings.
SECRET_WORDS = frozenset(
    {"APIKEY", "CREDENTIAL", "CREDENTIALS", "PASSPHRASE", "PASSWD", "PASSWORD", "SECRET", "TOKEN", "USERNAME"}
)
SECRET_PAIRS = frozenset({("ACCESS", "KEY"), ("API", "KEY"), ("PRIVATE", "KEY")})
ASSIGNED = r"([A-Za-z][\w-]*)=([^\s'\";&|)]+)"
AUTHORIZATION = r"\bauthorization:\s*(?:(?:basic|bearer|token)\s+)?([^\s'\";&|)]+)"


def is_secret_name(name: str) -> bool:
    """Return whether a variable or option of this name holds a credential."""
    words = re.findall(r"[A-Z0-9]+", name.upper())
    pairs = set(itertools.pairwise(words))
    return not SECRET_WORDS.isdisjoint(words) or not SECRET_PAIRS.isdisjoint(pairs) or words[-1:] == ["AUTH"]


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


def secrets_of_command(arguments: Sequence[str]) -> frozenset[str]:
    """Return the credentials in a command: in its URLs, options, assignments and headers.

    >>> sorted(secrets_of_command(["fetch", "--token", "abcdef", "--retries=3", "PASSWORD=opensesame"]))
    ['abcdef', 'opensesame']
    """
    found = set(secrets_of(arguments))
    for text in arguments:
        found |= {value for name, value in re.findall(ASSIGNED, text) if is_secret_name(name)}
        found |= set(re.findall(AUTHORIZATION, text, flags=re.IGNORECASE))
    # A script may be one argument: `sh -c "fetch --token abc"`.
    words = [word for argument in arguments for word in argument.split()]
    options = itertools.pairwise(words)
    found |= {value for option, value in options if re.fullmatch(r"--?[\w-]+", option) and is_secret_name(option)}
    # What names a variable hides its value already.
    return frozenset(one for one in found if len(one) > 3 and not one.startswith(("$", "-")))


def secret_digest(name: str, value: str) -> str:
    """Return a digest by which equal secrets are known, and from which none can be guessed at a reasonable cost.

    scrypt with the parameters of RFC 7914, section 2; the name is the salt, so that the digest is the same everywhere.
    """
    salt = f"fairlead-venvs:{name}".encode()
    return hashlib.scrypt(value.encode(), salt=salt, n=2**14, r=8, p=1, dklen=16).hex()


def ambient_secrets(env: Mapping[str, str] | None = None) -> frozenset[str]:
    """The credentials that uv finds in a process's variables."""
    variables = os.environ if env is None else env
    ours = {name: value for name, value in variables.items() if name.startswith("UV_") or "PROXY" in name.upper()}
    named = {value for name, value in ours.items() if is_secret_name(name) and len(value) > 3}
    return frozenset(named) | secrets_of(ours.values())


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """The text without credentials: those in any URL, and the given ones wherever they stand."""
    text = re.sub(USERINFO, rf"\1{BLOT}@", text, flags=re.IGNORECASE)
    text = re.sub(QUERY, _redacted_parameter, text)
    for secret in sorted(secrets, key=len, reverse=True):  # the longest first: one may be a part of another
        text = text.replace(secret, BLOT)
    return text


def _redacted_parameter(match: re.Match[str]) -> str:
    name = match[2]
    words = re.findall(r"[A-Z0-9]+", name.upper())
    secret = is_secret_name(name) or name.lower() in QUERY_NAMES or not QUERY_WORDS.isdisjoint(words)
    return f"{match[1]}{BLOT}" if secret else match[0]
