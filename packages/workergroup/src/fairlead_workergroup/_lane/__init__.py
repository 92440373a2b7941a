# SPDX-License-Identifier: Apache-2.0
"""The driver's end of a lane: calls that travel as messages instead of as calls of Ray actors."""
