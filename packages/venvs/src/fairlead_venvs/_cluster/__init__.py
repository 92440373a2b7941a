# SPDX-License-Identifier: Apache-2.0
"""Builds environments on the nodes of a Ray cluster, and finds the one that a worker runs in."""
