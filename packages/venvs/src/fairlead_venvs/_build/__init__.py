# SPDX-License-Identifier: Apache-2.0
"""Builds environments.

These modules are sent to the nodes by value, so a node needs only uv. They import only names, of one another and of the
standard library.
"""
