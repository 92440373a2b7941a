# SPDX-License-Identifier: Apache-2.0
"""Builds environments on the nodes of a Ray cluster, and chooses the environment of a worker."""
