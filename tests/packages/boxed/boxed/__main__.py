# SPDX-License-Identifier: Apache-2.0
"""An application: what the C symbol behind its kernel computes, and what it was given."""

import ctypes
import json
import sys

import tunekit as tk
from boxed import kernels


@tk.policy(missing="auto")
def main() -> int:
    """Print one line of JSON."""
    symbol = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)(kernels.plus.address())
    choice = kernels.plus.choice()
    variants = [suffix for suffix, _ in kernels.plus.variants()]
    found = [symbol(2, 3), kernels.shift(), choice.suffix, choice.source, choice.reason, variants, sys.argv[1:]]
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
