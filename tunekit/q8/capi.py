# SPDX-License-Identifier: Apache-2.0
"""The table of C functions behind ``tunekit_q8.h``: ``tunekit.q8._C_API``."""

from __future__ import annotations

from typing import Any

from tunekit._lock import lock
from tunekit.errors import AbiError
from tunekit.q8 import kernels, product

_made: list[Any] = []


def capsule() -> Any:
    """The capsule, made at the first request; fixes the choice of the row for the process.

    Raises:
        AbiError: nothing native is built here (an ImportError, so that a C consumer's import fails with it).
    """
    from tunekit import __version__, dispatch

    with lock:
        if not _made:
            row = product.native()
            kernel = kernels.q8q8.kernel
            if row is None:
                raise AbiError(f"tunekit.q8._C_API: there is no native code here: {dispatch.nothing_built(kernel)}")
            maker = f"tunekit {__version__} in {kernel.file}"
            source = kernels.q8q8.choice().source
            schema = (row.layout.kgroup, row.layout.nibble_kgroup, row.layout.bias)
            _made.append(row.core.q8_api(row.row, *schema, maker, row.suffix, source))
        return _made[0]
