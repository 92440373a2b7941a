# SPDX-License-Identifier: Apache-2.0
"""What a group knows of a class before any worker starts: the kinds of its methods, and which functions are methods."""

import functools
import pickle

import pytest
import ray

from fairlead_workergroup import RayWorkerBuilder
from fairlead_workergroup._remote.describe import describe
from fairlead_workergroup._start.worker_class import Method, WorkerClass, describe_class


def timed(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "option",
    [
        {"_generator_backpressure_num_objects": 2},
        {"_num_objects_per_yield": 2},
        {"concurrency_group": "io"},
        {"enable_task_events": False},
        {"max_task_retries": 3},
        {"num_returns": 2},
        {"retry_exceptions": True},
        {"retry_exceptions": [ValueError]},
        pytest.param({"tensor_transport": "nccl"}, id="torch"),
    ],
)
def test_options_of_plain_methods(option):
    """Each option of `@ray.method` is refused by its name."""
    if "tensor_transport" in option:
        pytest.importorskip("torch", reason="Ray knows its transports only with torch")
    try:
        method = ray.method(**option)
    except AssertionError:
        pytest.skip("this Ray does not have the option")

    class Worker:
        @method
        def step(self):
            return 1

    (name,) = option
    (refused,) = describe(Worker)["refused"]
    assert refused.startswith(f"step uses @ray.method({name.lstrip('_')}=")


class Hidden:
    def public(self):
        return 1

    def _step(self):
        return 2

    async def _later(self):
        return 3


def test_call_of_a_private_method():
    """The refusal names the builder's option if the class has the method."""
    described = describe_class(Hidden, asks=[], node_id="", runtime_env=None, timeout_s=1.0)
    with pytest.raises(
        AttributeError, match=r"it has \['public'\].*RayWorkerBuilder\(Hidden\).with_methods\('_step'\)"
    ):
        described.method("_step")
    with pytest.raises(AttributeError, match=r"it has \['public'\]$"):
        described.method("_other")


def test_methods_with_an_underscore():
    """They are described if they are named; an async one makes the methods of the class overlap, named or not."""
    assert [*describe(Hidden)["methods"]] == ["public"]
    assert [*describe(Hidden, more=["_step"])["methods"]] == ["_step", "public"]
    assert [describe(one)["is_async"] for one in (Hidden, Published, str)] == [True, True, False]


@pytest.mark.parametrize(
    ("concurrent", "cls", "overlaps"), [("auto", Hidden, True), ("auto", str, False), (False, Hidden, False)]
)
def test_auto(concurrent, cls, overlaps):
    """Methods of a group with async_communication="auto" overlap if the class has async methods."""
    described = describe_class(cls, asks=[], node_id="", runtime_env=None, timeout_s=1.0, concurrent=concurrent)
    assert described.concurrent is overlaps


def test_named_methods():
    """A builder adds methods with one leading underscore, which the class must have."""
    builder = RayWorkerBuilder(Hidden)
    assert builder.with_methods("_step").with_methods("_later").methods == ("_step", "_later")
    assert builder.methods == ()
    for name in ("public", "__init__", "_fairlead_start"):
        with pytest.raises(ValueError, match=f"one leading underscore, got '{name}'"):
            builder.with_methods(name)
    with pytest.raises(AttributeError, match="Hidden has no method _no, which its builder names"):
        describe_class(Hidden, ["_no"], asks=[], node_id="", runtime_env=None, timeout_s=1.0)


class Base:
    def inherited(self):
        return 1

    def overridden(self):
        return "base"


class Model(Base):
    def overridden(self):
        return "model"

    @timed
    def decorated(self):
        return 3

    def compared(self, other):
        return self is other

    @staticmethod
    def static(value):
        return value

    @classmethod
    def of_class(cls, value):
        return value

    def _private(self):
        return "private"


@pytest.mark.parametrize("by_name", [False, True], ids=["class", "name"])
def test_functions_that_are_methods(by_name):
    """Own, inherited, decorated and static methods are called by name; all other functions run as they are."""
    description = describe(Model)
    methods = {name: Method(name, kind, None) for name, (kind, _) in description["methods"].items()}
    full_name, cls = f"{__name__}.Model", None if by_name else Model
    model = WorkerClass(full_name, "Model", methods, cls=cls, full_names=description["full_names"])
    for name in ("inherited", "overridden", "decorated", "static", "of_class"):
        assert model.method(getattr(Model, name)) is model.methods[name]
        if not by_name:
            assert model.method(getattr(ray.remote(Model), name)) is model.methods[name]
    assert model.method(Base.inherited) is model.methods["inherited"]

    def inherited(worker):
        return worker

    for function in (Base.overridden, Model._private, inherited, Model().compared):
        assert model.method(function).function is not None


SECRET = "secret-in-a-default"


class Published:
    def loss(self, batch, /, scale=SECRET, *rest, strict=True, **more):
        return batch

    async def fetch(self, path):
        return path

    def tokens(self, count):
        yield count


def test_published_class():
    """The published description of a class has the parameters of its methods, and not the values of defaults."""
    described = describe_class(Published, asks=[], node_id="", runtime_env=None, timeout_s=1.0)
    published = pickle.dumps(described.plain)
    assert SECRET.encode() not in published
    read = WorkerClass.from_dict(pickle.loads(published))
    assert (read.name, read.concurrent, read.cls) == ("Published", False, None)
    assert {name: (one.kind, str(one.signature)) for name, one in read.methods.items()} == {
        name: (one.kind, str(one.signature)) for name, one in described.methods.items()
    }
    parameters = "batch, /, scale=Ellipsis, *rest, strict=Ellipsis, **more"
    assert str(read.method("loss").signature) == f"({parameters})"
    assert read.method(Published.tokens).result == "items"
    with pytest.raises(TypeError, match=r"loss\(batch, /, scale=\.\.\., "):
        read.method("loss").check(0, ())
