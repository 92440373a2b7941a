# SPDX-License-Identifier: Apache-2.0
"""A group whose workers are threads of this process, for tests of workers and controllers without a Ray."""
