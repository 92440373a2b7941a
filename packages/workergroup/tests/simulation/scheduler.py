# SPDX-License-Identifier: Apache-2.0
"""A world in which one thread runs at a time, and a list of choices decides which one.

Each task is a thread that holds a baton. Each operation of the seam is a point, where the task that runs picks the next
one. Actors, deaths and other happenings are sources of events, which run inline, without a thread. Time is virtual: it
advances when nothing can run.
"""

import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ray.exceptions import GetTimeoutError

from .seam import replaced_by
from .tasks import SimulatedEvent, SimulatedLock, SimulationError, Stop, Task

_K = TypeVar("_K")
# A run with more steps is a livelock.
MOST_STEPS = 20_000
# A task that runs longer than this between two points waits for something outside the seam.
STUCK_S = 60.0
# How long a task of a run that is over may take to end.
STOP_S = 5.0
# A task that catches `Stop` more often than this is left where it is.
MOST_STOPS = 1000


class Source:
    """Something that happens once: from a moment on, or at any moment at which a condition holds.

    Attributes:
        name: its name in the history.
        is_ready: returns whether it can happen now.
        due: the time at which it becomes ready, if nothing else makes it ready before.
        step: lets it happen.
    """

    def __init__(
        self, name: str, step: Callable[[], object], is_ready: Callable[[], bool], due: float | None = None
    ) -> None:
        self.name = name
        self.step = step
        self.is_ready = is_ready
        self.due = due


class SimulatedWorld:
    """The world of one run; see the class `World` of the package.

    Args:
        chooser: makes the choices of the run, as `exploration.Uniform` does.

    Attributes:
        current: the task that runs; None while an event happens.
        is_over: whether the run is over, and its tasks only have to end.
        failure: the first error of a task or an event.
        history: everything that has happened, a line for each.
        steps: the number of times that a task or an event was chosen.
        interrupted: the tasks that got a KeyboardInterrupt.
        invariants: called after each step; one that raises an error fails the run.
    """

    def __init__(self, chooser: Any) -> None:
        self.current: Task | None = None
        self.is_over: bool = False
        self.failure: BaseException | None = None
        self.history: list[str] = []
        self.steps = 0
        self.interrupted: set[Task] = set()
        self.invariants: list[Callable[[], object]] = []
        self.choose = chooser.choose_value
        self._choose_next = chooser.choose_next
        self._stops = 0
        self._now = 0.0
        self._tasks: list[Task] = []
        self._sources: list[Any] = []
        self._numbers = itertools.count(1)
        self._source: Any = None
        # The tasks that may be interrupted: they have a point after an operation too, where its result can be lost.
        self._fragile: set[str] = set()
        self._main = threading.Lock()
        self._main.acquire()

    # The seam.

    def now(self) -> float:
        """Return the virtual time."""
        return self._now

    def lock(self) -> SimulatedLock:
        """Return a lock that is not held over waits."""
        return SimulatedLock(self, self._name("lock"))

    def event(self) -> SimulatedEvent:
        """Return an event that has not happened."""
        return SimulatedEvent(self, self._name("event"))

    def spawn(self, name: str, work: Callable[[], object]) -> None:
        """Run a function as another task."""
        self.start_task(name, work)
        self.point(f"starts {name}")

    def thread(self) -> int:
        """Return the number of the present task."""
        return 0 if self.current is None else self.current.number

    def wait(
        self, refs: Sequence[Any], *, num_returns: int, timeout: float | None, fetch_local: bool = True
    ) -> tuple[list[Any], list[Any]]:
        """Wait as `ray.wait` does."""
        what = f"waits for {num_returns} of {len(refs)} answers"
        self.wait_for(what, lambda: sum(1 for ref in refs if ref.is_done) >= num_returns, timeout)
        ready = [ref for ref in refs if ref.is_done][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def collect(
        self, requests: Mapping[_K, Callable[[], Any]], timeout_s: float
    ) -> dict[_K, tuple[Any, Exception | None]]:
        """Send requests, and return each answer with its error, as placement's `collect` does."""
        refs = {key: send() for key, send in requests.items()}
        if refs:
            self.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
        answers: dict[_K, tuple[Any, Exception | None]] = {}
        for key, ref in refs.items():
            try:
                answers[key] = (ref.value(), None) if ref.is_done else (None, GetTimeoutError())
            except Exception as error:  # noqa: BLE001  it is the outcome
                answers[key] = None, error
        return answers

    def get(self, refs: Sequence[Any], *, timeout: float | None) -> list[Any]:
        """Return values, or raise the first error, as `ray.get` does."""

        def is_enough() -> bool:
            return all(ref.is_done for ref in refs) or any(ref.has_failed for ref in refs)

        self.wait_for(f"gets {len(refs)} answers", is_enough, timeout)
        for ref in refs:
            if ref.has_failed:
                ref.value()
        if not all(ref.is_done for ref in refs):
            raise GetTimeoutError(f"Get timed out: some object(s) not ready after {timeout} s.")
        return [ref.value() for ref in refs]

    # What scripts, pretended actors and invariants use.

    @property
    def who(self) -> str:
        """The name of the task or the source that runs."""
        if self._source is not None:
            return self._source.name
        return "nobody" if self.current is None else self.current.name

    def note(self, what: str, who: str = "") -> None:
        """Add a line to the history."""
        self.history.append(f"{self._now:8.3f}  {who or self.who:<14}  {what}")

    def fail(self, error: BaseException) -> BaseException:
        """Let the run fail with this error, even if a caller catches it; return the error."""
        self.failure = self.failure or error
        return error

    def add(self, source: Any) -> None:
        """Add a source of events: a `Source`, or an actor, which has the same attributes."""
        self._sources.append(source)

    def remove(self, source: Any) -> None:
        """Remove a source of events."""
        self._sources.remove(source)

    def add_fault(
        self,
        name: str,
        act: Callable[[], object],
        when: Callable[[], bool] = lambda: True,
        due: float | None = None,
    ) -> None:
        """Let something happen once, at any moment at which a condition holds; `due` is when that will be so."""

        def act_once() -> None:
            self.remove(source)
            self.note("happens")
            act()

        source = Source(name, act_once, when, due)
        self.add(source)

    def add_timer(self, name: str, seconds: float, act: Callable[[], object]) -> None:
        """Let something happen after some seconds of virtual time."""
        due = self._now + seconds
        self.add_fault(name, act, lambda: self._now >= due, due)

    def start_task(self, name: str, work: Callable[[], object]) -> Task:
        """Run a function as another task; unlike `spawn`, this is not a point."""
        task = Task(self, next(self._numbers), name, work)
        self._tasks.append(task)
        return task

    def join(self, tasks: Iterable[Task]) -> None:
        """Wait until other tasks have ended."""
        tasks = list(tasks)
        self.wait_for(f"joins {', '.join(task.name for task in tasks)}", lambda: all(task.is_done for task in tasks))

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.wait_for(f"sleeps {seconds:g} s", lambda: False, seconds)

    def press_ctrl_c(self, name: str) -> None:
        """Interrupt the tasks of this name at any point of theirs, whether they wait there or not."""
        self._fragile.add(name)

        def find() -> list[Task]:
            return [task for task in self._tasks if task.name == name and not task.interrupted]

        def interrupt() -> None:
            (task, *_) = find()
            task.interrupted = True
            self.interrupted.add(task)

        self.add_fault(f"Ctrl-C in {name}", interrupt, lambda: bool(find()))

    def wait_for(self, what: str, is_ready: Callable[[], object], timeout: float | None = None) -> None:
        """Wait until a condition holds, or for some seconds of virtual time."""
        if timeout is not None and timeout <= 0:
            self.point(what)
            return
        if self.current is not None and self.current.held:
            held = ", ".join(lock.name for lock in self.current.held)
            raise self.fail(SimulationError(f"lock held: {self.who} {what} while it holds {held}"))
        self.point(what, is_ready, None if timeout is None else self._now + timeout)

    def point(self, what: str, is_ready: Callable[[], object] | None = None, due: float | None = None) -> None:
        """Let another task run, or an event happen, before the present task continues.

        Args:
            what: what the task does when it continues.
            is_ready: returns whether it can continue; None if it can.
            due: the time at which it continues at the latest.
        """
        if self.is_over:
            self._stops += 1
            if self._stops > MOST_STOPS:
                threading.Event().wait()
            raise Stop
        me = self.current
        if me is None:
            raise self.fail(SimulationError(f"event waits: {self.who} {what}"))
        me.waits_for, me.is_ready, me.due = what, is_ready, due
        chosen = self._pick()
        if chosen is not me:
            self._hand_over(chosen)
            me.turn.acquire()
            if self.is_over:
                raise Stop
            self.current = me
        me.is_ready = me.due = None
        if me.interrupted:
            me.interrupted = False
            self.note(f"is interrupted where it {what}", me.name)
            raise KeyboardInterrupt
        self.note(what, me.name)

    def after(self, what: str) -> None:
        """Be a point after an operation whose result an interrupt would lose."""
        if self.current is not None and self.current.name in self._fragile:
            self.point(what)

    # The run.

    def run(self, script: Callable[["SimulatedWorld"], object]) -> None:
        """Run a script as the task `main`, until all tasks have ended; `failure` is the first error."""
        with replaced_by(self):
            self.start_task("main", lambda: script(self))
            self._hand_over(self._pick())
            if not self._main.acquire(timeout=STUCK_S):
                self.failure = SimulationError(f"outside the seam: {self._describe_stuck()}")
            self.is_over = True
            # The script ends last: others may use what it has replaced.
            for task in self._tasks[::-1]:
                task.turn.release()
                task.thread.join(STOP_S)

    def end_task(self, task: Task) -> None:
        """Let another task run, because this one has ended."""
        task.is_done = True
        if not self.is_over:
            self._tasks.remove(task)
            self._hand_over(self._pick())

    def _hand_over(self, task: Task | None) -> None:
        (self._main if task is None else task.turn).release()

    def _pick(self) -> Task | None:
        """Let events happen until a task is chosen; return None at the end of the run."""
        while self._tasks:
            self._check_invariants()
            if self.failure is not None:
                break
            options = self._options()
            if not options:
                self._advance()
                continue
            self.steps += 1
            if self.steps > MOST_STEPS:
                self.fail(SimulationError(f"livelock: the run has more than {MOST_STEPS} steps"))
                break
            chosen = options[self._choose_next(options)] if len(options) > 1 else options[0]
            if isinstance(chosen, Task):
                return chosen
            self._let_happen(chosen)
        return None

    def _check_invariants(self) -> None:
        try:
            for check in self.invariants:
                check()
        except Exception as error:  # noqa: BLE001  the run raises it
            self.fail(error)

    def _options(self) -> list[Any]:
        """Return the tasks and sources that can run now, the present task first."""
        now, me, options = self._now, self.current, list[Any]()
        for task in self._tasks:
            ready = task.is_ready
            if ready is None or task.interrupted or (task.due is not None and task.due <= now) or ready():
                options.insert(0 if task is me else len(options), task)
        return options + [source for source in self._sources if source.is_ready()]

    def _let_happen(self, source: Any) -> None:
        me, self.current, self._source = self.current, None, source
        try:
            source.step()
        except BaseException as error:  # noqa: BLE001  the run raises it
            self.fail(error)
        finally:
            self.current, self._source = me, None

    def _advance(self) -> None:
        """Let virtual time pass until something can run."""
        moments = [waiting.due for waiting in (*self._tasks, *self._sources) if waiting.due is not None]
        later = min(moments, default=self._now)
        if later <= self._now:
            waiting = "; ".join(f"{task.name} {task.waits_for}" for task in self._tasks)
            self.fail(SimulationError(f"deadlock: {waiting}"))
        self._now = later

    def _name(self, kind: str) -> str:
        """Return the name of a lock or an event: the module, the line and a number."""
        frame = sys._getframe(2)
        return f"{kind} {next(self._numbers)} ({frame.f_globals['__name__'].rpartition('.')[2]}:{frame.f_lineno})"

    def _describe_stuck(self) -> str:
        """Return where the task is that has the baton and does not come to a point."""
        frame = None if self.current is None else sys._current_frames().get(self.current.thread.ident or 0)
        trace = "".join(traceback.format_stack(frame)) if frame is not None else "an event does not end"
        return f"{self.who} has not come to a point of the seam within {STUCK_S:g} s:\n{trace}"
