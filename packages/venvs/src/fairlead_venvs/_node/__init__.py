# SPDX-License-Identifier: Apache-2.0
"""Builds environments on one machine. Sent to nodes by value: imports the standard library, the errors and itself."""
