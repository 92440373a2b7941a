# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-venvs as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

from fairlead_venvs import (
    PY_EXECUTABLES,
    UvUnavailableError,
    Venv,
    VenvBuildError,
    VenvError,
    VenvMismatchError,
    VenvNodesError,
    VenvSpec,
    VenvTimeoutError,
    WorkerEnv,
    actor_environments,
    create_local_venv,
    create_local_venv_on_each_node,
    ensure_venvs,
    ensure_worker_env,
    get_actor_python_env,
    known_actor_environments,
    list_venvs,
    make_actor_runtime_env,
    prune,
    register_actor_env,
)


def specify() -> None:
    spec = VenvSpec(requirements=["numpy>=2"], python="3.11", env={"UV_TORCH_BACKEND": "cpu"}, setup=["echo"])
    assert_type(spec, VenvSpec)
    VenvSpec(project=Path("folder"), extras=["vllm"], groups=["dev"], default_groups=True, no_groups=["docs"])
    VenvSpec(project="folder", install_project=False, frozen=True, find_links=["wheels"], system_site_packages=True)
    VenvSpec(command="uv run --locked --extra vllm", index="https://example.org/simple", no_index=False)
    assert_type(spec.fingerprint(), str)
    assert_type(spec.requirements, Sequence[str] | None)
    assert_type(spec.project, str | Path | None)
    for names in (spec.extras, spec.groups, spec.no_groups, spec.find_links, spec.setup):
        assert_type(names, Sequence[str])
    for flag in (
        spec.default_groups,
        spec.install_project,
        spec.frozen,
        spec.no_index,
        spec.system_site_packages,
    ):
        assert_type(flag, bool)
    assert_type(spec.python, str | None)
    assert_type(spec.index, str | None)
    assert_type(spec.env, Mapping[str, str])


def build(spec: VenvSpec) -> None:
    assert_type(create_local_venv(spec, "name", force_rebuild=True, timeout_s=60), str)
    assert_type(create_local_venv("uv run --locked"), str)
    assert_type(create_local_venv_on_each_node(spec, "name", nodes=["id"], timeout_s=60, progress=False), str)
    assert_type(ensure_venvs([spec, "uv run --locked"], venv_name="name", nodes=None), list[str])


def run(spec: VenvSpec) -> None:
    env = ensure_worker_env(spec, nodes=["id"], timeout_s=60, progress=False)
    assert_type(env, WorkerEnv)
    assert_type(env.python, str)
    assert_type(env.runtime_env, Mapping[str, Any])
    assert_type(make_actor_runtime_env("package.Worker", nodes=["id"]), dict[str, Any])


def register(spec: VenvSpec) -> None:
    assert_type(register_actor_env("package.Worker", spec), None)
    register_actor_env("package.Worker", PY_EXECUTABLES.SYSTEM)
    assert_type(PY_EXECUTABLES.SYSTEM, str)
    assert_type(PY_EXECUTABLES.BASE, str)
    assert_type(PY_EXECUTABLES.VLLM, str)
    assert_type(actor_environments, dict[str, str | VenvSpec])
    assert_type(known_actor_environments(), dict[str, str | VenvSpec])
    assert_type(get_actor_python_env("package.Worker"), str | VenvSpec)


def tidy(spec: VenvSpec) -> None:
    venvs = list_venvs(sizes=False)
    assert_type(venvs, list[Venv])
    assert_type(prune(["name", spec, *venvs], older_than=timedelta(days=1), dry_run=True), list[Venv])
    assert_type(prune(older_than=60), list[Venv])
    for venv in venvs:
        assert_type(venv.path, Path)
        assert_type(venv.ray, str | None)
        for text in (venv.python, venv.description, venv.version, venv.fingerprint, venv.request):
            assert_type(text, str)
        assert_type(venv.built_at, float)
        assert_type(venv.used_at, float)
        assert_type(venv.hosts, tuple[str, ...])
        assert_type(venv.size_bytes, int | None)
        assert_type(venv.pids, tuple[int, ...])


def errors(spec: VenvSpec) -> None:
    try:
        create_local_venv(spec)
    except VenvBuildError as error:
        assert_type(error.reason, str)
        assert_type(error.command, str)
        assert_type(error.output, tuple[str, ...])
        assert_type(error.node, str | None)
    except VenvTimeoutError as error:
        late: TimeoutError = error
        assert_type(error.doing, str)
        assert_type(error.timeout_s, float)
        assert_type(error.node, str | None)
        raise late from None
    except UvUnavailableError as error:
        assert_type(error.reason, str)
        assert_type(error.node, str | None)
    except VenvMismatchError as error:
        for text in (error.component, error.actual, error.required, error.where):
            assert_type(text, str)
        assert_type(error.node, str | None)
    except VenvNodesError as error:
        every: VenvError = error
        assert_type(error.message, str)
        assert_type(error.derive([VenvBuildError("")]), VenvNodesError)
        for one in error.exceptions:
            assert_type(one, VenvError | ExceptionGroup[VenvError])
        raise every from None


def wrong(spec: VenvSpec, venv: Venv) -> None:
    VenvSpec(["numpy"])  # type: ignore[call-arg]
    VenvSpec(requirements=[1])  # type: ignore[list-item]
    VenvSpec(requirements=["numpy"], env={"A": 1})  # type: ignore[dict-item]
    create_local_venv(["numpy"])  # type: ignore[arg-type]
    create_local_venv_on_each_node(spec, "name", ["id"])  # type: ignore[call-arg]
    ensure_venvs(spec)  # type: ignore[arg-type]
    ensure_worker_env(None)  # type: ignore[arg-type]
    register_actor_env("package.Worker", {"requirements": []})  # type: ignore[arg-type]
    list_venvs(False)  # type: ignore[call-arg]
    prune(older_than="1d")  # type: ignore[arg-type]
    spec.python = "3.12"  # type: ignore[misc]
    venv.size_bytes = 0  # type: ignore[misc]
