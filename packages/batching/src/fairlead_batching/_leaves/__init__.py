# SPDX-License-Identifier: Apache-2.0
"""Leaves of all kinds: what can be done with one, the types that are registered, and the ways to torch and Ray."""
