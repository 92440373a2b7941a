# SPDX-License-Identifier: Apache-2.0
"""Looks at the groups of any job of a cluster from a process that owns none of them."""
