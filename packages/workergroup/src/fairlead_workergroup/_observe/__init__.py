# SPDX-License-Identifier: Apache-2.0
"""Looking at workers from outside: their status, memory, and verdicts about the lost ones."""
