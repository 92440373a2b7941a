# SPDX-License-Identifier: Apache-2.0
"""Finds what is wrong with a cluster before a job is started on it."""
