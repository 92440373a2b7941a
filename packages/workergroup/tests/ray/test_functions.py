# SPDX-License-Identifier: Apache-2.0
"""Tests of functions in place of method names: methods of the class, and functions that run in real workers."""

import functools
import importlib
import sys
import threading

import numpy as np
import pytest
import ray

from fairlead_workergroup import (
    PerWorker,
    Shard,
)

from ..calling import Worker


class TestRefused:
    """Nothing is launched for a function that cannot run in a worker."""

    @pytest.mark.parametrize(
        ("function", "args", "message"),
        [
            (lambda: 1, (), r"has no positional parameter.* f\(worker, \.\.\.\)"),
            (lambda *, key: 1, (), "has no positional parameter"),
            (lambda worker, one: 1, (), "missing a required argument: 'one'"),
            (lambda worker: 1, (2,), "too many positional arguments"),
            (Worker, (), "call takes a method's name, a method of the class, or a function"),
            (7, (), "call takes a method's name.*got 7"),
        ],
    )
    def test_wrong_functions(self, group, requests, function, args, message):
        """Functions with other parameters, classes, and objects that cannot be called are refused."""
        for refuse in (group.call, group.at().explain):
            with pytest.raises(TypeError, match=message):
                refuse(function, *args)
        assert requests == []

    def test_generator_functions(self, group, requests):
        """Generator functions are refused with the remedy, but for the generator methods of the class."""

        def items(worker, count):
            yield from range(count)

        async def async_items(worker, count):
            yield count

        message = r"items' is a generator function.*make it a generator method of the class, or return a list"
        for function in (items, async_items, functools.partial(items)):
            for refuse in (group.call, group.at().explain):
                with pytest.raises(TypeError, match=message):
                    refuse(function, 2)
            with pytest.raises(TypeError, match=message):
                group.map(function, range(2))
        assert requests == []
        assert group.call(Worker.items, 2, collect=()).result() == [500, 501]

    def test_functions_that_cannot_be_pickled(self, group, requests):
        """The error names the function, the variable and the reason."""
        lock = threading.Lock()

        def locked(worker):
            return lock

        message = (
            r"the function '.*locked' cannot be sent to the workers: it uses 'lock', a lock: TypeError: cannot pickle"
        )
        for function in (locked, functools.partial(locked)):
            with pytest.raises(TypeError, match=message):
                group.call(function)
        assert requests == []


class TestCalls:
    """Tests of functions that are called as methods are."""

    def test_method_of_the_class(self, group, puts):
        """`group.call(Worker.rank)` is `group.call("rank")`."""
        call = group.call(Worker.rank)
        assert call.result() == list(range(8))
        assert repr(call).startswith("Call('rank', ")
        assert puts == []

    @pytest.mark.smoke
    def test_arguments_and_answers(self, group):
        """A function works with wrapped arguments, collected axes, views, calls as arguments, and closures."""
        factor = 10

        def scaled(worker, value, *, plus=0):
            return worker.rank(), factor * value + plus

        assert group.call(scaled, Shard([1, 2], "dp"), plus=PerWorker(range(8)), collect="dp").result() == [
            (5, 15),
            (0, 20),
        ]
        assert group.at(dp=0, tp=0).call(scaled, 1).result() == [(5, 10)]
        assert group.with_options(collect=()).call(scaled, value=1).result() == (5, 10)
        assert group.call(functools.partial(scaled, plus=1), 0, collect=()).result() == (5, 1)
        assert group.call(lambda worker, ranks: sum(ranks), group.call("rank"), collect=()).result() == 28
        assert group.call(lambda worker, rank: rank, group.call("rank", collect=()), collect=()).result() == 5

    def test_async_functions(self, group):
        """An async function runs to its end, and may await the worker's async methods."""

        async def fetch(worker):
            return await worker.slow_echo("fetched")

        assert group.call(fetch, collect=()).result() == "fetched"

    @pytest.mark.smoke
    def test_errors(self, group):
        """An exception keeps its type, also if only the function's module has its class."""

        class Unlucky(Exception):
            pass

        def fail(worker):
            if worker.rank() == 3:
                raise Unlucky("rank 3")

        with pytest.raises(Unlucky, match="rank 3") as caught:
            group.call(fail).result()
        assert "raised by rank 3" in caught.value.__notes__[0]

    def test_stored_functions(self, group, puts):
        """A small function travels with the call; a large one is stored once, however many workers run it."""
        table = np.zeros(100_000)
        small, large = (lambda worker: 1), (lambda worker: len(table))
        assert "0 value(s) stored" in group.at().explain(small)
        assert "1 value(s) stored" in group.at().explain(large)
        group.call(small)
        assert puts == []
        assert group.call(large).result() == [100_000] * 8
        assert len(puts) == 1
        assert 800_000 < puts[0] < 820_000

    def test_map(self, group, puts):
        """`map` takes functions, and stores a large one once for all items."""
        table = np.arange(100_000)
        assert list(group.map(lambda worker, item: int(table[item]), range(20))) == list(range(20))
        assert len(puts) == 1
        assert sorted(group.map(Worker.slow_echo, range(4))) == [0, 1, 2, 3]


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Return a module that only the driver can import, with a function that uses parts of it."""
    (tmp_path / "outside_module.py").write_text(
        "SCALE = 3\n"
        "class Refused(Exception): pass\n"
        "def helper(value): return SCALE * value\n"
        "def use(worker, value):\n"
        "    if value is None: raise Refused('no value')\n"
        "    return helper(value)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("outside_module")
    yield module
    if "outside_module" in ray.cloudpickle.list_registry_pickle_by_value():
        ray.cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["outside_module"]


class TestModules:
    """Tests of functions from modules that workers do not have."""

    def test_module_of_the_driver_only(self, group, outside):
        """A registered module's functions and exceptions travel by value; before, the error names the remedy."""
        with pytest.raises(TypeError, match=r"'use' needs the module 'outside_module'.*register_pickle_by_value"):
            group.call(outside.use, 2).result()
        ray.cloudpickle.register_pickle_by_value(outside)
        assert group.call(outside.use, 2, collect=()).result() == 6
        assert group.call(lambda worker: outside.SCALE, collect=()).result() == 3
        with pytest.raises(outside.Refused):
            group.call(outside.use, None).result()

    def test_the_package_of_the_class(self, group):
        """Functions of the package that workers import their class from see the same classes there."""
        assert group.call(is_a_worker, collect=()).result()

    def test_a_function_that_cannot_be_loaded(self, group):
        """A note on any other error says which function the worker loaded."""

        class Refusing:
            def __reduce__(self):
                return int, ("no number",)

        with pytest.raises(ValueError, match="no number") as caught:
            group.call(functools.partial(Worker.echo, Refusing())).result()
        assert any("while the worker loaded the function" in note for note in caught.value.__notes__)


def is_a_worker(worker):
    return isinstance(worker, Worker)
