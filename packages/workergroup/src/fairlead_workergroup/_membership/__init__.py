# SPDX-License-Identifier: Apache-2.0
"""Who is in a group, and every change of that."""
