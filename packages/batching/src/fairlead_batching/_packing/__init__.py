# SPDX-License-Identifier: Apache-2.0
"""Packers: which sequences share a bin of tokens."""
