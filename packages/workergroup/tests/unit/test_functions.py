# SPDX-License-Identifier: Apache-2.0
"""Tests of functions in place of method names: how they are recognized and pickled."""

import functools

import pytest
import ray

from fairlead_workergroup._remote.describe import describe
from fairlead_workergroup._start.worker_class import Method, WorkerClass, function_kind, function_name

from ..calling import Worker


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapper


def anonymous(function):
    return lambda *args: function(*args)


class Base:
    def inherited(self):
        return 1

    def overridden(self):
        return "base"


class Model(Base):
    def overridden(self):
        return "model"

    @doubled
    def decorated(self):
        return 3

    renamed = anonymous(Base.inherited)

    @staticmethod
    def static(value):
        return value

    @classmethod
    def of_class(cls, value):
        return value

    def _private(self):
        return "private"


class Owner:
    """A callable object with a method."""

    def __call__(self, worker):
        yield worker

    def method(self, worker):
        return worker


def described(cls, *, by_name):
    """Return the description of a class that is given as the class or by its full name."""
    description = describe(cls)
    methods = {name: Method(name, kind, None) for name, (kind, _) in description["methods"].items()}
    name = f"{cls.__module__}.{cls.__qualname__}"
    return WorkerClass(name, "Model", methods, cls=None if by_name else cls, full_names=description["full_names"])


class TestResolution:
    """Tests of functions that are methods of the class."""

    @pytest.mark.parametrize("by_name", [False, True], ids=["class", "name"])
    def test_methods(self, by_name):
        """Own, inherited, decorated and static methods are called by name."""
        model = described(Model, by_name=by_name)
        for name in ("inherited", "overridden", "decorated", "static", "of_class"):
            assert model.method(getattr(Model, name)) is model.methods[name]
        assert model.method(Base.inherited) is model.methods["inherited"]

    def test_methods_that_have_another_name(self):
        """With the class at hand a method is found by its function, not by the function's name."""
        model = described(Model, by_name=False)
        assert model.method(Model.renamed) is model.methods["renamed"]
        # With the full name only, the method of an anonymous function is not known.
        assert described(Model, by_name=True).method(Model.renamed).function is not None

    @pytest.mark.parametrize("by_name", [False, True], ids=["class", "name"])
    def test_other_functions(self, by_name):
        """Overridden methods, private methods and namesakes from elsewhere are ordinary functions."""

        def inherited(worker):
            return worker

        model = described(Model, by_name=by_name)
        for function in (Base.overridden, Model._private, inherited):
            assert model.method(function).hosted == "_fairlead_function_plain"

    def test_remote_class(self):
        """Methods looked up on a `@ray.remote` class are those of the class below."""
        remote = ray.remote(Model)
        model = described(Model, by_name=False)
        assert model.method(remote.decorated) is model.methods["decorated"]
        assert model.method(remote.of_class) is model.methods["of_class"]

    def test_a_bound_method_is_a_function(self):
        """A method of an object in the driver is not the worker's method."""
        model = described(Owner, by_name=False)
        assert model.method(Owner.method) is model.methods["method"]
        assert model.method(Owner().method).function is not None

    def test_kinds_and_names(self):
        """Partial functions and callable objects have the kind and the name of the function that they call."""

        async def fetch(worker, x):
            pass

        async def tokens(worker):
            yield 1

        unnamed = lambda worker: 1  # noqa: E731

        assert function_kind(fetch) == function_kind(functools.partial(fetch, x=1)) == "async"
        assert (function_kind(tokens), function_kind(Worker.items)) == ("async_generator", "generator")
        assert (function_kind(Owner()), function_kind(len)) == ("generator", "plain")
        assert function_name(functools.partial(fetch, x=1)).endswith("fetch")
        assert function_name(Owner()) == "Owner"
        assert function_name(unnamed).endswith(f"<lambda> (test_functions.py:{unnamed.__code__.co_firstlineno})")
