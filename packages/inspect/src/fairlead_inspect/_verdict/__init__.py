# SPDX-License-Identifier: Apache-2.0
"""From a snapshot of a cluster to a verdict. Pure: it needs neither a cluster nor a clock."""
