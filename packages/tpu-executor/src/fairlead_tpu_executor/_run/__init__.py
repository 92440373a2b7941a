# SPDX-License-Identifier: Apache-2.0
"""Work on slices that are held: what is sent to each host, how it is watched, judged and repeated."""
