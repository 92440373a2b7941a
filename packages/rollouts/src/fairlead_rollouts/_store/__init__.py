# SPDX-License-Identifier: Apache-2.0
"""Durable state: the snapshot in the trainer's checkpoint, and the file that is at most a second old."""
