# SPDX-License-Identifier: Apache-2.0
"""Reads what nodes have, and runs the node agents that measure them and lease their ports."""
