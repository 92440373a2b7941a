# SPDX-License-Identifier: Apache-2.0
"""Decides which node each bundle goes to. Pure functions: no module here imports Ray."""
