# SPDX-License-Identifier: Apache-2.0
"""uv's settings for a spec, from its fields and the driver's variables. They apply on every node and count."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .._build import uv
from .._build.redact import ambient_secrets, find_secrets, is_secret_name, redact
from .._build.uv import Deadline, Runner, Session
from .spec import BaseSpec, resolve_link


@dataclass(frozen=True)
class Settings:
    """uv's settings for one spec."""

    env: Mapping[str, str]  # for every machine
    here: Mapping[str, str]  # for the driver; some of it names files of this machine
    counted: Mapping[str, str]  # by the fingerprint: files by their content, and no credentials
    links: tuple[str, ...]  # from the driver's variables
    secrets: frozenset[str]
    no_index: bool

    def make_runner(self, session: Session | None) -> Runner:
        """Return a runner of uv on the driver; without a session, one with the default time limit."""
        session = session or Session(Deadline(1800.0))
        return Runner(session, env=self.here, secrets=self.secrets | ambient_secrets(), no_index=self.no_index)


def read_settings(spec: BaseSpec, variables: Mapping[str, str] | None = None, project: str = "") -> Settings:
    """Read uv's settings for a spec: its fields and its `env` come before the variables of the driver."""
    ambient = _select_ambient(spec, os.environ if variables is None else variables)
    links = tuple(resolve_link(link) for link in ambient.pop("UV_FIND_LINKS", "").split(",") if link)
    merged = {**ambient, **spec.env}
    if refused := [name for name in uv.REFUSED if merged.get(name)]:
        raise ValueError(
            f"{refused[0]} names a file that the nodes may lack. Unset it, and put its settings into env as variables "
            "of uv, or into the project."
        )
    secrets = {value for name, value in merged.items() if is_secret_name(name) and len(value) > 3}
    secrets |= find_secrets([*merged.values(), *links])
    plain = {name: value for name, value in merged.items() if name not in uv.FILES}
    here: dict[str, str] = {}
    texts: dict[str, list[str]] = {}
    for name in uv.FILES:
        if paths := [resolve_link(path) for path in merged.get(name, "").split()]:
            here[name] = " ".join(paths)
            texts[name] = [path if "://" in path else _read_file(name, path) for path in paths]
            secrets |= find_secrets(texts[name])
    hidden = frozenset(secrets)
    plainly = [name for name in plain if not is_secret_name(name) and not uv.is_neutral(name)]
    counted = {name: redact(plain[name], hidden) for name in plainly}
    # By a hash, as the text of a file may be long.
    for name, content in texts.items():
        counted[name] = hashlib.sha256(redact("\0".join(content), hidden).encode()).hexdigest()
    if links:
        counted["UV_FIND_LINKS"] = redact(",".join(links), hidden)
    env = {**plain, **({} if spec.index is None else {"UV_DEFAULT_INDEX": spec.index})}
    if found := spec.find_links or links:
        here["UV_FIND_LINKS"] = ",".join(found)
    hidden |= find_secrets([*spec.find_links, spec.index or "", *(spec.requirements or ()), project])
    return Settings(env, {**env, **here}, counted, links, hidden, spec.no_index)


def _select_ambient(spec: BaseSpec, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's settings, without those that the spec replaces."""
    replaced = set(spec.env)
    if spec.no_index:
        replaced |= set(uv.INDEXES)
    if spec.index is not None or not replaced.isdisjoint(uv.DEFAULT_INDEXES):
        replaced |= set(uv.DEFAULT_INDEXES)
    if spec.find_links:
        replaced.add("UV_FIND_LINKS")
    ours = [name for name in variables if uv.is_deciding(name) or uv.is_index_credential(name)]
    return {name: variables[name] for name in ours if name not in replaced and variables[name]}


def _read_file(name: str, path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError as error:
        raise ValueError(f"{name} names {path}, which cannot be read: {error.strerror}. Correct or unset it.") from None
