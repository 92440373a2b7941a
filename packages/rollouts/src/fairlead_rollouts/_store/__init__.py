# SPDX-License-Identifier: Apache-2.0
"""Durable state: the snapshot in the trainer's checkpoint, and the journal on a local disk."""
