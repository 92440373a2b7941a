# SPDX-License-Identifier: Apache-2.0
"""The reward of GRPO in tests, which verl loads from this file."""


def score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Return more for the right answer, and a little for a long one, so that samples of a prompt differ."""
    return solution_str.count(ground_truth) + 0.01 * len(solution_str)
