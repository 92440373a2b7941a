# SPDX-License-Identifier: Apache-2.0
"""Who is in a group, every change of that, and everything that a group has to return."""
