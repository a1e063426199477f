# SPDX-License-Identifier: Apache-2.0
"""An application with a policy: it prints how it was started, and what the C symbol behind its kernel computes."""

from __future__ import annotations

import ctypes
import json
import os
import sys

import alpha

import tunekit as tk

LIBRARIES = [alpha]
if os.environ.get("WITH_BETA"):
    import beta

    LIBRARIES.append(beta)


def value(function: tk.Tuned) -> int:
    """The fingerprint of the row that runs, by calling its address."""
    return int(ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)(function.address())(2, 3))


def report() -> dict[str, object]:
    return {
        "values": [value(library.toy) for library in LIBRARIES],
        "argv": sys.argv[1:],
        "folder": os.getcwd(),  # noqa: PTH109
        "pid": os.getpid(),
        "flags": [sys.flags.optimize, sys.flags.dev_mode],
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("TUNEKIT_RAIL", "MARK"))},
    }


@tk.policy(missing=os.environ.get("MISSING", "auto"), time_limit=float(os.environ.get("LIMIT", "60")))
def main() -> int:
    print(json.dumps(report()), flush=True)
    return int(os.environ.get("STATUS", "0"))


if __name__ == "__main__":
    sys.exit(main())
