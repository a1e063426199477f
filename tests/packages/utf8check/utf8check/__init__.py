# SPDX-License-Identifier: Apache-2.0
"""Is it UTF-8? Tuned for the box, with one kernel for text of any kind and one for text that is mostly ASCII."""

from __future__ import annotations

import numpy as np

from utf8check.kernels import valid, valid_ascii

__all__ = ["is_utf8", "valid", "valid_ascii"]


def is_utf8(data: bytes, mostly_ascii: bool = False) -> bool:
    """Whether bytes are well-formed UTF-8. ``mostly_ascii`` picks the kernel that was tuned for such text."""
    view = np.frombuffer(data, np.uint8)
    return bool((valid_ascii if mostly_ascii else valid)(view, view.size))
