# SPDX-License-Identifier: Apache-2.0
"""Groups that change while they run: resizes along one axis."""
