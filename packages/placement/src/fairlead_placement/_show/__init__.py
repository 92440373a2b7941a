# SPDX-License-Identifier: Apache-2.0
"""Shows clusters, reservations and refusals to people."""
