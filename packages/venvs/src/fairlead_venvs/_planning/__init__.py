# SPDX-License-Identifier: Apache-2.0
"""Reads a request on the driver and decides the exact content of its environment."""
