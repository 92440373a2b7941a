# SPDX-License-Identifier: Apache-2.0
"""`python -m fairlead_workergroup`: says where its commands are."""

import sys

if __name__ == "__main__":
    sys.exit("The commands are in fairlead-inspect: pip install fairlead-inspect, then python -m fairlead_inspect.")
