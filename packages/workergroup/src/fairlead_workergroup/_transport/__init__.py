# SPDX-License-Identifier: Apache-2.0
"""The ways of calls to workers: Ray's own, and others that a group may use for a time."""
