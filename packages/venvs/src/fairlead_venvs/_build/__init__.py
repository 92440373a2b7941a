# SPDX-License-Identifier: Apache-2.0
"""Builds environments. These modules are sent to the nodes by value, so they import only one another and the standard library."""
