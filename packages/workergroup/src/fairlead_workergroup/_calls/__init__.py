# SPDX-License-Identifier: Apache-2.0
"""Calls: the plan of one, sending, waiting and fetching."""
