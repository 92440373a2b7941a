# SPDX-License-Identifier: Apache-2.0
"""Tests of `call`: recipients, arguments and results, on the group and on views; and of dry runs."""

import numpy as np
import pytest
import ray

from fairlead_workergroup import Call, MultiWorkerFuture, PerWorker, Shard


class TestRecipientsAndResults:
    @pytest.mark.smoke
    def test_everybody(self, group):
        """Without options all workers are called with the same arguments, and results are by rank."""
        call = group.call("rank")
        assert isinstance(call, Call)
        assert isinstance(call, MultiWorkerFuture)
        assert call.result() == list(range(8))
        assert group.call("echo", 1, b=2).result() == [((1,), {"b": 2})] * 8

    @pytest.mark.smoke
    def test_shards(self, group):
        """Each argument has its own axes; the worker at coordinate c gets piece c, whatever its rank."""
        got = group.call("echo", Shard(["d0", "d1"], "dp"), x=Shard([["t0d0", "t0d1"]] + [["?", "?"]] * 3, "tp", "dp"))
        answers = got.result()
        assert answers[5] == (("d0",), {"x": "t0d0"})
        assert answers[0] == (("d1",), {"x": "t0d1"})
        assert [args[0] for args, _ in answers] == ["d1", "d0", "d0", "d1", "d1", "d0", "d0", "d1"]

    @pytest.mark.smoke
    def test_per_worker(self, group):
        """Each called worker gets one value, by ascending rank."""
        assert [args[0] for args, _ in group.call("echo", PerWorker([f"r{i}" for i in range(8)])).result()] == [
            f"r{i}" for i in range(8)
        ]
        assert group.at(tp=0).call("echo", PerWorker(["r0", "r5"])).result() == [(("r0",), {}), (("r5",), {})]

    @pytest.mark.smoke
    @pytest.mark.parametrize(
        ("collect", "ranks"),
        [
            ("dp", [5, 0]),
            (["tp"], [5, 1, 6, 2]),
            (("dp", "tp"), [5, 1, 6, 2, 0, 7, 3, 4]),
            (("tp", "dp"), [5, 0, 1, 7, 6, 3, 2, 4]),
            ((), 5),
        ],
    )
    def test_collect(self, group, collect, ranks):
        """Each coordinate has one result, row-major in the order given; with no axes, it is the one result itself."""
        assert group.call("rank", collect=collect).result() == ranks

    @pytest.mark.smoke
    def test_discard(self, group):
        """No worker returns a result, but errors are raised."""
        call = group.call("make", 8, discard=True)
        assert (call.result(), call.outcomes(), call.refs) == (None, [], [])
        assert ray.get(call.futures) == [None] * 8
        with pytest.raises(ValueError, match="rank 3 would not"):
            group.call("fail", [3], discard=True).result()

    @pytest.mark.smoke
    def test_bad_calls_reach_no_worker(self, group, requests):
        """Wrong methods, arguments, axes, numbers of pieces and timeouts reach no worker."""
        for error, method, args, options in [
            (AttributeError, "nothing", (), {}),
            (AttributeError, "_fairlead_start", (), {}),
            (TypeError, "rank", (1,), {}),
            (ValueError, "echo", (Shard([1], "dp"),), {}),
            (ValueError, "echo", (PerWorker([1]),), {}),
            (ValueError, "rank", (), {"collect": "pp"}),
            (ValueError, "rank", (), {"timeout": -1}),
            (ValueError, "rank", (), {"timeout": float("inf")}),
            (TypeError, "rank", (), {"timeout": "1"}),
        ]:
            with pytest.raises(error):
                group.call(method, *args, **options)
            with pytest.raises(error):
                group.at().explain(method, *args, **options) if "timeout" not in options else group.call(
                    method, **options
                )
        assert requests == []


class TestViews:
    def test_integers_slices_and_views_of_views(self, group):
        """An integer drops the axis, and a slice keeps it and counts from 0; coordinates in errors are the group's."""
        first = group.at(dp=0)
        assert (first.ranks, first.call("rank", collect="tp").result()) == ([1, 2, 5, 6], [5, 1, 6, 2])
        some = group.at(tp=slice(1, 3))
        assert some.call("rank", collect=("dp", "tp")).result() == [1, 6, 7, 3]
        assert some.call("echo", Shard(["a", "b"], "tp")).result()[-1] == (("a",), {})
        assert some.coords == {
            1: {"dp": 0, "tp": 0},
            3: {"dp": 1, "tp": 1},
            6: {"dp": 0, "tp": 1},
            7: {"dp": 1, "tp": 0},
        }
        one = some.at(dp=-1).at(tp=0)
        assert (one.ranks, one.call("rank").result(), one.call("rank", collect=()).result()) == ([7], [7], 7)
        assert (one.sharding_annotations.shape, one.coords) == ({"worker": 1}, {7: {"worker": 0}})
        with pytest.raises(ValueError, match="rank 7 would not") as caught:
            one.call("fail", [7]).result()
        assert "rank 7 (dp=1, tp=1)" in caught.value.__notes__[0]

    def test_with_options(self, group):
        """With options on a view, every keyword goes to the method; options add up, and views of the view keep them."""
        view = group.with_options(collect="dp").with_options(timeout=30).at(tp=slice(0, 2))
        answers = view.call("with_our_names", collect=1, timeout=2, discard=3, retries=4).result()
        assert answers == [(1, 2, 3, 4)] * 2
        assert view.explain("with_our_names", collect=1, timeout=2).splitlines()[0].endswith("2 result(s)")
        with pytest.raises(ValueError, match="Invalid axis name: 'pp'"):
            group.with_options(collect="pp")


class TestExplain:
    def test_table(self, group, puts, requests):
        """A dry run shows the pieces, the stored values and the places of results, and sends nothing."""
        plan = group.at().explain("echo", Shard([np.ones(3), np.ones(3)], "dp"), "small", x=np.ones(2), collect=("dp",))
        assert (puts, requests) == ([], [])
        lines = plan.splitlines()
        assert lines[0] == "echo: 8 of 8 workers called, 3 value(s) stored, 2 result(s)"
        assert lines[1].split() == ["rank", "dp", "tp", "argument", "0", "argument", "1", "x", "result"]
        assert lines[2].split() == ["0", "1", "0", "piece", "1", "the", "same", "the", "same", "1"]
        assert lines[7].split()[:4] == ["5", "0", "0", "piece"]
        assert lines[7].split()[-1] == "0"
        assert "piece 7" in group.at().explain("echo", PerWorker([1] * 8))
        assert "0 value(s) stored" in group.at().explain("echo", ray.put(1))
