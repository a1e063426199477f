# SPDX-License-Identifier: Apache-2.0
"""Gates and regimes of the toy family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tunekit.measure.fixtures import GateCase, Regime


def _adds_k(row: Any) -> str | None:
    k = row.call("toy_k")
    got = row.call("toy", 2, 3)
    return None if got == 5 + k else f"toy(2, 3) gave {got}, expected {5 + k}"


def _sums(row: Any) -> str | None:
    x = np.arange(7, dtype=np.float32)
    y = np.full(7, np.nan, np.float32)
    row.call("toy_sum", y, x, 7)
    return None if np.array_equal(y, x + row.call("toy_k")) else f"toy_sum gave {y}"


def _prepare(row: Any) -> Callable[[], None]:
    x = np.ones(65536, np.float32)
    y = np.empty_like(x)

    def run() -> None:
        row.call("toy_sum", y, x, x.size)

    return run


class FIXTURES:
    """What ``fixtures=`` of the declaration names."""

    @staticmethod
    def gates() -> list[GateCase]:
        return [GateCase("adds k", _adds_k), GateCase("sums", _sums)]

    @staticmethod
    def regimes() -> list[Regime]:
        return [Regime("sum", 65536.0, "G elements/s", "*", _prepare)]
