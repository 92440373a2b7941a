# SPDX-License-Identifier: Apache-2.0
"""uv's settings for a spec, from its fields and the driver's variables. They apply on every node and count."""

import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .._build.recipe import File
from .._build.redact import ambient_secrets, digest_secret, find_command_secrets, find_secrets, is_secret_name, redact
from .._build.uv import (
    DECIDING,
    DEFAULT_INDEXES,
    FILES,
    INDEXES,
    Deadline,
    Runner,
    Session,
    is_index_credential,
    is_neutral,
)
from .spec import BaseSpec

# The time limit in seconds of a caller that gives none.
DEADLINE_S = 1800.0
# How many digests of secrets a process keeps.
DIGESTS = 256


@dataclass(frozen=True)
class Settings:
    """uv's settings for one spec.

    Attributes:
        env: variables for uv on every machine.
        here: variables for uv on the driver, some of which name files of this machine.
        counted: the settings that the fingerprint counts, without credentials; files by their content.
        links: folders and URLs where uv finds distributions, from the driver's variables.
        files: files to send to the nodes.
        config: the path among them of uv's configuration; empty if there is none.
        build_constraints: the paths among them, and URLs, of constraints for building source distributions.
        secrets: the credentials in the spec, in its project, and in the settings.
        no_index: whether uv uses no package index.
    """

    env: Mapping[str, str]
    here: Mapping[str, str]
    counted: Mapping[str, str]
    links: tuple[str, ...]
    files: tuple[File, ...]
    config: str
    build_constraints: tuple[str, ...]
    secrets: frozenset[str]
    no_index: bool

    def make_runner(self, session: Session | None) -> Runner:
        """Return a runner of uv on the driver; without a session, one with the default time limit."""
        session = session or Session(Deadline(DEADLINE_S))
        return Runner(session, env=self.here, secrets=self.secrets | ambient_secrets(), no_index=self.no_index)


def read_settings(spec: BaseSpec, variables: Mapping[str, str] | None = None, project: str = "") -> Settings:
    """Read uv's settings for a spec: its fields and its `env` come before the variables of the driver."""
    ambient = _select_ambient(spec, os.environ if variables is None else variables)
    links = tuple(_resolve(link) for link in ambient.pop("UV_FIND_LINKS", "").split(",") if link)
    merged = {**ambient, **spec.env}
    secrets = {value for name, value in merged.items() if is_secret_name(name) and len(value) > 3}
    secrets |= find_secrets([*merged.values(), *links])
    plain = {name: value for name, value in merged.items() if name not in FILES}
    here: dict[str, str] = {}
    texts: dict[str, list[str]] = {}
    files: list[File] = []
    staged: dict[str, tuple[str, ...]] = {}
    for name in FILES:
        if not merged.get(name):
            continue
        # uv's configuration is one file, whose path may have spaces.
        given = [merged[name]] if name == "UV_CONFIG_FILE" else merged[name].split()
        paths = [_resolve(path) for path in given]
        here[name] = " ".join(paths)
        contents = {path: _read_file(name, path) for path in paths if "://" not in path}
        texts[name] = [contents[path].decode(errors="replace") if path in contents else path for path in paths]
        secrets |= find_secrets(texts[name])
        if name in ("UV_BUILD_CONSTRAINT", "UV_CONFIG_FILE"):  # the others are only used for the resolution
            stem = "uv.toml" if name == "UV_CONFIG_FILE" else "build-constraint-{}.txt"
            places = {path: f"settings/{stem.format(number)}" for number, path in enumerate(contents)}
            files += [(places[path], content) for path, content in contents.items()]
            staged[name] = tuple(places.get(path, path) for path in paths)
    hidden = frozenset(secrets)
    plainly = [name for name in plain if not is_secret_name(name) and not is_neutral(name)]
    counted = {name: redact(plain[name], hidden) for name in plainly}
    # By a hash, as the text of a file may be long.
    for name, content in texts.items():
        counted[name] = hashlib.sha256(redact("\0".join(content), hidden).encode()).hexdigest()
    if links:
        counted["UV_FIND_LINKS"] = redact(",".join(links), hidden)
    env = {**plain, **({} if spec.index is None else {"UV_DEFAULT_INDEX": spec.index})}
    if found := spec.find_links or links:
        here["UV_FIND_LINKS"] = ",".join(found)
    of_spec = find_secrets([*spec.find_links, spec.index or "", *(spec.requirements or ()), project])
    return Settings(
        env=env,
        here={**env, **here},
        counted=counted,
        links=links,
        files=tuple(files),
        config=next(iter(staged.get("UV_CONFIG_FILE", ())), ""),
        build_constraints=staged.get("UV_BUILD_CONSTRAINT", ()),
        secrets=hidden | of_spec | find_command_secrets(spec.setup),
        no_index=spec.no_index,
    )


def _select_ambient(spec: BaseSpec, variables: Mapping[str, str]) -> dict[str, str]:
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


def _resolve(path: str) -> str:
    """Return the absolute path of a path of this machine, and a URL unchanged."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _read_file(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name} names {path}, which cannot be read: {error.strerror}. Correct or unset it.") from None


def digest_secrets(spec: BaseSpec) -> dict[str, str]:
    """Return digests of the secrets that may decide the content: all but the credentials of package indexes."""
    digests = {
        name: _digest(name, value)
        for name, value in spec.env.items()
        if is_secret_name(name) and not is_index_credential(name) and not is_neutral(name)
    }
    if find_command_secrets(spec.setup):
        digests["setup"] = _digest("setup", "\0".join(spec.setup))
    return digests


# A digest takes some 50 ms on purpose.
_digest = functools.lru_cache(maxsize=DIGESTS)(digest_secret)
