# SPDX-License-Identifier: Apache-2.0
"""From slots and a class to running workers: layout, options, environment, launch."""
