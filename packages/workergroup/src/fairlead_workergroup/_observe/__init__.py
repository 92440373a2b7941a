# SPDX-License-Identifier: Apache-2.0
"""The questions of a group to nodes, to Ray's head and to boards, and what it shows of the answers."""
