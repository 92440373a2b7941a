# SPDX-License-Identifier: Apache-2.0
"""A package, so that none of its modules has the name of one of the standard library."""
