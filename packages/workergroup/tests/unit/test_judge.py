# SPDX-License-Identifier: Apache-2.0
"""The judge of death: what evidence adds up to, and whom the judge asks, without Ray."""

import ast
from pathlib import Path

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

import fairlead_workergroup
from fairlead_placement import HeadTimeoutError
from fairlead_workergroup._membership.judge import Evidence, Judge, decide
from fairlead_workergroup._observe import evidence as witnesses
from fairlead_workergroup._observe import query
from fairlead_workergroup._observe.evidence import RayWitnesses, check_head, evidence_of, judge_errors
from fairlead_workergroup.extension import WorkerProcess

WORKER = WorkerProcess(3, {"dp": 3}, "a" * 8, "10.0.0.1", 77, 123, "actor")


def gone(source, kind=None, text="", **more):
    return Evidence(source, "gone", kind, text or f"{source} says so", at=1.0, **more)


def says(source, word, at=1.0):
    return Evidence(source, word, text=f"{source} is {word}", at=at)


GUARD = gone("memory-guard", "out-of-memory")
NODE = gone("node", "node-lost")
ACTOR = gone("actor-state")
PROCESS = gone("process")
USER = gone("user", "cancelled")
ERROR = gone("ray-error", "killed", exit_code=3)


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        ([], ("unknown", None, "")),
        ([says("process", "alive")], ("alive", None, "")),
        ([says("process", "silent")], ("unknown", None, "process is silent")),
        ([says("actor-state", "silent")], ("unknown", None, "actor-state is silent")),
        # A look that was answered after the doubt removes it, and a doubt after the answer needs another look.
        ([says("ray-error", "silent"), says("process", "alive", 2.0)], ("alive", None, "")),
        ([says("process", "alive"), says("ray-error", "silent", 2.0)], ("unknown", None, "ray-error is silent")),
        ([says("actor-state", "silent"), says("process", "alive")], ("alive", None, "")),
        ([ACTOR], ("lost", "killed", "actor-state says so")),
        ([ERROR, ACTOR], ("lost", "killed", "ray-error says so")),
        ([PROCESS], ("lost", "killed", "process says so")),
        ([PROCESS, ERROR], ("lost", "killed", "ray-error says so")),
        ([NODE], ("lost", "node-lost", "node says so")),
        ([NODE, ERROR], ("lost", "node-lost", "ray-error says so")),
        ([NODE, gone("ray-error", "preempted")], ("lost", "preempted", "ray-error says so")),
        ([NODE, gone("ray-error", "out-of-memory")], ("lost", "out-of-memory", "ray-error says so")),
        ([GUARD, ERROR, PROCESS], ("lost", "out-of-memory", "memory-guard says so")),
        ([USER, ERROR, NODE], ("lost", "cancelled", "user says so")),
        ([PROCESS, says("process", "alive", 9.0)], ("lost", "killed", "process says so")),
    ],
)
def test_decide(evidence, expected):
    """Each kind of loss, and what is known of a process that is not lost."""
    verdict = decide(WORKER, evidence)
    assert (verdict.state, verdict.kind, verdict.cause) == expected
    assert sorted(verdict.evidence, key=repr) == sorted(evidence, key=repr)


def test_failure():
    """The report of a loss names the incarnation, the kind, the cause and the exit code."""
    failure = decide(WORKER, [PROCESS, ERROR]).failure()
    assert (failure.rank, failure.kind, failure.cause) == (3, "killed", "ray-error says so")
    assert (failure.node_id, failure.pid, failure.exit_code, failure.signal) == (WORKER.node_id, 77, 3, None)


EVIDENCE = st.lists(
    st.builds(
        Evidence,
        st.sampled_from(["memory-guard", "user", "ray-error", "node", "actor-state", "process"]),
        st.sampled_from(["alive", "gone", "silent"]),
        st.sampled_from([None, "killed", "node-lost", "out-of-memory", "preempted"]),
        st.sampled_from(["", "a", "b"]),
        st.sampled_from([None, 1]),
        at=st.sampled_from([1.0, 2.0, 3.0]),
    ),
    max_size=6,
)


@given(EVIDENCE, EVIDENCE, st.randoms(use_true_random=False))
def test_lost_is_final(before, after, random):
    """Evidence never withdraws a loss, silence never makes one, and the order of evidence does not matter."""
    verdict = decide(WORKER, before)
    assert (verdict.state == "lost") == any(one.says == "gone" for one in before)
    assert verdict.state != "lost" or decide(WORKER, before + after).state == "lost"
    mixed = random.sample(before, len(before))
    judge = Judge()
    assert decide(WORKER, mixed) == verdict
    assert judge.tell(WORKER, *before).state == verdict.state
    assert judge.tell(WORKER, *after).state == decide(WORKER, before + after).state


class Asked:
    """Witnesses that note who was asked."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def __getattr__(self, name):
        def answer(workers, within_s):
            self.asked.append((name, within_s))
            return {worker: [one] for worker in workers if (one := self.answers.get(name)) is not None}

        return answer


@pytest.mark.parametrize(
    ("look", "answers", "asked", "state"),
    [
        ("known", {}, [], "unknown"),
        ("head", {}, ["head"], "unknown"),
        ("head", {"head": ACTOR}, ["head"], "lost"),
        ("node", {"node": says("process", "alive")}, ["node"], "alive"),
        ("node", {"node": PROCESS, "guard": GUARD}, ["node", "guard"], "lost"),
        ("node", {"node": NODE}, ["node"], "lost"),
        ("cause", {"node": PROCESS}, ["ray"], "unknown"),
        ("all", {"head": says("actor-state", "silent")}, ["head", "node"], "unknown"),
        ("all", {"head": ACTOR, "ray": ERROR}, ["head", "ray", "guard"], "lost"),
        ("all", {"node": PROCESS}, ["head", "node", "ray", "guard"], "lost"),
    ],
)
def test_ask(look, answers, asked, state):
    """A judge asks only the sources of the look, the living about their death and the dead about its cause."""
    sources = Asked(**answers)
    verdict = Judge(sources).ask([WORKER], look=look, within_s=5.0)[WORKER]
    assert [name for name, _ in sources.asked] == asked
    assert verdict.state == state


def test_incarnations():
    """The loss of a process says nothing about its successor in the same rank."""
    judge, successor = Judge(), WorkerProcess(3, {}, "a" * 8, "10.0.0.1", 78, 124)
    judge.tell(WORKER, PROCESS)
    assert judge.ask([successor, WORKER], look="known")[successor].state == "unknown"


def fail_to_answer():
    raise HeadTimeoutError("Ray's head did not answer")


def test_silent_head(monkeypatch):
    """A head that does not answer makes nothing lost, and an operation can tell that it was silent."""
    monkeypatch.setattr(witnesses, "dead_actors", fail_to_answer)
    judge = Judge(RayWitnesses(None))
    verdict = judge.ask([WORKER], look="head", within_s=1.0)[WORKER]
    assert verdict.state == "unknown"
    with pytest.raises(HeadTimeoutError, match="did not answer"):
        check_head([verdict], since=verdict.evidence[0].at)
    check_head([verdict], since=verdict.evidence[0].at + 1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ray.exceptions.ActorDiedError(), ("gone", "killed")),
        (ray.exceptions.WorkerCrashedError(), ("gone", "killed")),
        (ray.exceptions.NodeDiedError("its node died"), ("gone", "node-lost")),
        (ray.exceptions.ActorUnschedulableError("no node"), ("gone", "node-lost")),
        (ray.exceptions.OutOfMemoryError("too much"), ("gone", "out-of-memory")),
        (ray.exceptions.ActorUnavailableError("out of reach", None), ("silent", None)),
        (ray.exceptions.ObjectLostError("ab" * 28, None, ""), ("silent", None)),
        (ray.exceptions.GetTimeoutError("late"), None),
        (ValueError("of the method"), None),
    ],
)
def test_evidence_of_errors(error, expected):
    """Ray's error classes, and nothing else, say what became of a worker."""
    found = evidence_of(error)
    assert (None if found is None else (found.says, found.kind)) == expected


AWAY = ray.exceptions.ActorUnavailableError("out of reach", None)
DEAD = ray.exceptions.ActorDiedError()
OTHER = WorkerProcess(4, {}, "b" * 8, "10.0.0.2", 79, 125)


@pytest.mark.parametrize(
    ("ended", "is_lost"),
    [
        pytest.param([True], True, id="its node says that it has ended"),
        pytest.param([False, None, True], True, id="it exits"),
        pytest.param([None], False, id="its node is silent"),
        pytest.param([False], False, id="its connection had broken"),
    ],
)
def test_worker_out_of_reach(monkeypatch, ended, is_lost):
    """A worker that refuses requests is looked at until its process has ended, or for a limited time."""
    answers = list(ended)
    monkeypatch.setattr(
        witnesses, "ask_nodes", lambda workers, *_, **__: [answers.pop(0) if len(answers) > 1 else answers[0]]
    )
    monkeypatch.setattr(witnesses, "REFUSED_EVERY_S", 0.0)
    lost = judge_errors(Judge(RayWitnesses(lambda worker: None)), {WORKER: AWAY}, within_s=0.3)
    assert [verdict.kind for verdict in lost] == ["killed"] * is_lost


def test_workers_that_have_not_replied(monkeypatch):
    """Nodes are asked about workers that have not replied only if no error tells of a death."""
    asked = []

    def ask_nodes(workers, *_, **__):
        asked.extend(workers)
        return [True] * len(workers)

    monkeypatch.setattr(witnesses, "ask_nodes", ask_nodes)
    error = ray.exceptions.RayTaskError("step", "a traceback", RuntimeError("a collective failed"), "", 1, "")
    for own, others, found in ((DEAD, [], [WORKER]), (error, [OTHER], [OTHER])):
        judge = Judge(RayWitnesses(lambda worker: None))
        lost = judge_errors(judge, {WORKER: own}, silent=[OTHER], within_s=1.0)
        assert ([verdict.worker for verdict in lost], asked) == (found, others)


@pytest.mark.parametrize("left_s", [0.0, 1.0])
def test_silent_node_with_a_verdict(monkeypatch, left_s):
    """A call whose worker has died with a memory limit does not wait for a silent node a second past its deadline."""
    waited = []

    def run_on_nodes(function, asks, *, timeout_s):
        waited.append(timeout_s)
        return {node_id: TimeoutError("no answer") for node_id in asks}

    monkeypatch.setattr(query, "run_on_nodes", run_on_nodes)
    lost = judge_errors(Judge(RayWitnesses(lambda worker: None, memory_limit=True)), {WORKER: DEAD}, within_s=left_s)
    assert [verdict.kind for verdict in lost] == ["killed"]
    assert 0.5 <= sum(waited) < left_s + 1


def test_one_module_reads_deaths():
    """Everyone else asks the judge: one module reads which actors are dead, and which errors of Ray mean a death."""
    folder = Path(fairlead_workergroup.__file__).parent
    found = set()
    for module in folder.rglob("*.py"):
        for one in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            names = [name.name for name in one.names] if isinstance(one, ast.ImportFrom) else []
            names += [one.attr] if isinstance(one, ast.Attribute) else []
            if {"dead_actors", "ActorDiedError", "WorkerCrashedError", "NodeDiedError"} & {*names}:
                found.add(str(module.relative_to(folder)))
    assert found == {"_observe/head.py", "_observe/evidence.py"}
