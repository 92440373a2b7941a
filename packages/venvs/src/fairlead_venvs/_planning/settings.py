# SPDX-License-Identifier: Apache-2.0
"""uv's settings from the driver's variables. They hold on every node, and the fingerprint counts them."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .._build.redact import is_secret_name, redacted, secrets_of
from .._build.variables import DECIDING, DEFAULT_INDEXES, FILES, INDEXES, is_index_credential, is_neutral
from .._spec import VenvSpec

__all__ = ["Settings", "read_settings"]


@dataclass(frozen=True)
class Settings:
    """uv's settings for one spec, from its own `env` and from the variables of the driver.

    Attributes:
        env: variables for uv on every machine.
        here: variables for uv on the driver, in addition: they name files of this machine.
        counted: what the fingerprint counts, without credentials; files by their content.
        links: folders and URLs where uv finds distributions, of the driver's variables.
        files: relative paths of files that are shipped, and their content.
        config: the one of them that is uv's configuration; empty without.
        build_constraints: those of them, or URLs, that constrain what builds source distributions.
        secrets: what must not be seen.
    """

    env: Mapping[str, str]
    here: Mapping[str, str]
    counted: Mapping[str, str]
    links: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...]
    config: str
    build_constraints: tuple[str, ...]
    secrets: frozenset[str]


def read_settings(spec: VenvSpec, variables: Mapping[str, str] | None = None) -> Settings:
    """Read uv's settings for a spec.

    Args:
        spec: its fields and its `env` come before the variables of the driver.
        variables: those of the driver; by default this process's.

    Raises:
        ValueError: a variable names a file that cannot be read.
    """
    ambient = _ambient(spec, os.environ if variables is None else variables)
    links = tuple(_absolute(link) for link in ambient.pop("UV_FIND_LINKS", "").split(",") if link)
    merged = {**ambient, **spec.env}
    secrets = {value for name, value in merged.items() if is_secret_name(name) and len(value) > 3}
    secrets |= secrets_of([*merged.values(), *links])
    plain = {name: value for name, value in merged.items() if name not in FILES}
    here: dict[str, str] = {}
    texts: dict[str, list[str]] = {}
    files: list[tuple[str, bytes]] = []
    staged: dict[str, tuple[str, ...]] = {}
    for name in FILES:
        if not merged.get(name):
            continue
        # uv's configuration is one file, whose path may have spaces.
        given = [merged[name]] if name == "UV_CONFIG_FILE" else merged[name].split()
        paths = [_absolute(path) for path in given]
        here[name] = " ".join(paths)
        contents = {path: _content(name, path) for path in paths if "://" not in path}
        texts[name] = [contents[path].decode(errors="replace") if path in contents else path for path in paths]
        secrets |= secrets_of(texts[name])
        if name in ("UV_BUILD_CONSTRAINT", "UV_CONFIG_FILE"):  # the others are done with when all is resolved
            places = {path: _place(name, number) for number, path in enumerate(contents)}
            files += [(places[path], content) for path, content in contents.items()]
            staged[name] = tuple(places.get(path, path) for path in paths)
    hidden = frozenset(secrets)
    counted = {name: redacted(value, hidden) for name, value in plain.items() if _counts(name)}
    # The text of a file may be long.
    counted |= {name: _digest(redacted("\0".join(content), hidden)) for name, content in texts.items()}
    if links:
        counted["UV_FIND_LINKS"] = redacted(",".join(links), hidden)
    return Settings(
        env={**plain, **({} if spec.index is None else {"UV_DEFAULT_INDEX": spec.index})},
        here={**here, **({"UV_FIND_LINKS": ",".join(links)} if links else {})},
        counted=counted,
        links=links,
        files=tuple(files),
        config=next(iter(staged.get("UV_CONFIG_FILE", ())), ""),
        build_constraints=staged.get("UV_BUILD_CONSTRAINT", ()),
        secrets=hidden,
    )


def _ambient(spec: VenvSpec, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's settings, without those that the spec replaces."""
    replaced = set(spec.env)
    if spec.no_index:
        replaced |= set(INDEXES)
    if spec.index is not None or not replaced.isdisjoint(DEFAULT_INDEXES):
        replaced |= set(DEFAULT_INDEXES)
    if spec.find_links:
        replaced.add("UV_FIND_LINKS")
    # The values of all others need not be decoded.
    names = [name for name in variables if name.startswith("UV_") and name not in replaced]
    settings = {name: variables[name] for name in names if name in DECIDING or is_index_credential(name)}
    return {name: value for name, value in settings.items() if value}


def _absolute(path: str) -> str:
    """A path of this machine as uv finds it from any folder; a URL as it is."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _place(name: str, number: int) -> str:
    return "settings/uv.toml" if name == "UV_CONFIG_FILE" else f"settings/build-constraint-{number}.txt"


def _content(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name} names {path}, which cannot be read: {error.strerror}. Correct or unset it.") from None


def _counts(name: str) -> bool:
    return not is_secret_name(name) and not is_neutral(name)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
