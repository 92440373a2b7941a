# SPDX-License-Identifier: Apache-2.0
"""Reserves placement groups, keeps what belongs to a reservation together, and gives it back."""
