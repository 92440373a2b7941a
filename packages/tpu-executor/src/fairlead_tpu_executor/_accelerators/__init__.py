# SPDX-License-Identifier: Apache-2.0
"""What to run on: configurations, TPU types, and the slices among the nodes of a cluster. Pure."""
