# SPDX-License-Identifier: Apache-2.0
"""The arguments and the futures of the requests to workers."""
