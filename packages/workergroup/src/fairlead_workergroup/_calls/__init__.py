# SPDX-License-Identifier: Apache-2.0
"""What a call is made of: its plan, how it is sent, waited for and fetched."""
