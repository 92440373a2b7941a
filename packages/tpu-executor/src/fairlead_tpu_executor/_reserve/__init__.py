# SPDX-License-Identifier: Apache-2.0
"""Slices that are held: taken from Ray, replaced when they are lost, and given back."""
