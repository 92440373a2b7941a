# SPDX-License-Identifier: Apache-2.0
"""Use fairlead-venvs as type checkers see it. `nox -s typecheck` checks these types; nothing runs them.

A comment that ignores an error marks a use that type checkers must reject: an ignore without an error is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import fairlead_venvs as venvs
from fairlead_venvs import VenvSpec


def specify() -> None:
    spec = VenvSpec(requirements=["numpy>=2"], python="3.11", env={"UV_TORCH_BACKEND": "cpu"}, setup=["echo"])
    VenvSpec(project=Path("folder"), extras=["vllm"], groups=["dev"], frozen=True, find_links=["wheels"])
    VenvSpec(command="uv run --locked --extra vllm", index="https://example.org/simple")
    assert_type(spec.fingerprint(), str)
    VenvSpec(["numpy"])  # type: ignore[call-arg]
    VenvSpec(requirements=[1])  # type: ignore[list-item]
    spec.python = "3.12"  # type: ignore[misc]


def build(spec: VenvSpec) -> None:
    assert_type(venvs.create_local_venv("uv run --locked", "name", timeout_s=60), str)
    assert_type(venvs.create_local_venv_on_each_node(spec, "name", nodes=["id"]), str)
    assert_type(venvs.ensure_venvs([spec, "uv run --locked"], nodes=None), list[str])
    env = venvs.ensure_worker_env(spec, nodes=["id"], timeout_s=60)
    assert_type(env, venvs.WorkerEnv)
    assert_type((env.python, env.runtime_env), tuple[str, Mapping[str, Any]])
    venvs.ensure_venvs(spec)  # type: ignore[arg-type]
    venvs.ensure_worker_env(None)  # type: ignore[arg-type]


def register(spec: VenvSpec) -> None:
    assert_type(venvs.register_actor_env("package.Worker", spec), None)
    venvs.register_actor_env("package.Worker", venvs.PY_EXECUTABLES.SYSTEM)
    assert_type(venvs.actor_environments, dict[str, str | VenvSpec])
    assert_type(venvs.known_actor_environments(), dict[str, str | VenvSpec])
    assert_type(venvs.get_actor_python_env("package.Worker"), str | VenvSpec)
    assert_type(venvs.make_actor_runtime_env("package.Worker", nodes=["id"]), dict[str, Any])
    venvs.register_actor_env("package.Worker", {"requirements": []})  # type: ignore[arg-type]


def tidy(spec: VenvSpec) -> None:
    found = venvs.list_venvs()
    assert_type(found, list[venvs.Venv])
    assert_type((found[0].path, found[0].ray), tuple[Path, str | None])
    assert_type(venvs.prune(["name", spec, *found], older_than=3600), list[venvs.Venv])
    venvs.prune(older_than="1d")  # type: ignore[arg-type]


def read_errors(error: venvs.VenvError) -> None:
    match error:
        case venvs.UvUnavailableError() | venvs.VenvMismatchError():
            assert_type(error.node, str | None)
        case venvs.VenvBuildError():
            assert_type((error.reason, error.output, error.node), tuple[str, tuple[str, ...], str | None])
        case venvs.VenvTimeoutError():
            assert_type((error.doing, error.timeout_s), tuple[str, float])
        case venvs.VenvNodesError():
            for one in error.exceptions:
                assert_type(one, venvs.VenvError | ExceptionGroup[venvs.VenvError])
