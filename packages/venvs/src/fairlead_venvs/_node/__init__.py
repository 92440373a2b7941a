# SPDX-License-Identifier: Apache-2.0
"""Builds environments on one machine.

These modules are sent to the nodes by value, so a node needs only Ray and uv. They import the standard library, the
errors and one another.
"""
