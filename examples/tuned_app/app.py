# SPDX-License-Identifier: Apache-2.0
"""An application that tunes its box when it is started for the first time: ``python app.py``."""

import logging
import sys

import numpy as np
from walk_kernels import column_sums

import tunekit as tk


@tk.policy(missing="auto")
def main() -> int:
    """Sum the columns of a matrix, and say on which row."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("tunekit").setLevel(logging.WARNING)
    a = np.ones((2048, 1024), np.float32)
    sums = np.empty(1024, np.float32)
    column_sums(sums, a, *a.shape)
    logging.getLogger("tunekit").setLevel(logging.INFO)
    tk.log_status("app")
    print(f"{sums.size} columns, each with the sum {sums[0]:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
