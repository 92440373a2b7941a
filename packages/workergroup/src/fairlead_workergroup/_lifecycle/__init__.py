# SPDX-License-Identifier: Apache-2.0
"""The life of a group after its start: restart, shutdown, and what has to be given back."""
