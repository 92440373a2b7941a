# SPDX-License-Identifier: Apache-2.0
"""The life of a group: start, restart, shutdown, and the resources that it has to release."""
