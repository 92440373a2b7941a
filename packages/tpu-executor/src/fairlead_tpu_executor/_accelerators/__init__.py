# SPDX-License-Identifier: Apache-2.0
"""Accelerators: configurations, TPU types, and the slices among the nodes of a cluster. Pure."""
