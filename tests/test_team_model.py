# SPDX-License-Identifier: Apache-2.0
"""Every interleaving of the team's protocol: no chunk twice or never, no wake-up lost; and faults would be found."""

from __future__ import annotations

import pytest
from team_model import Violation, claims, parking


@pytest.mark.parametrize(
    ("ops", "workers"),
    [
        ([(2,), (3,), (1,)], 1),
        ([(3,), (1,), (3,)], 1),
        ([(2,), (2,)], 2),
        ([(1,), (3,)], 2),
        ([(2, 1), (1, 2)], 1),
        ([(1, 1), (2,), (1, 1)], 1),
        ([(2,), (1, 1)], 2),
        ([(0, 2), (2, 0)], 1),
        ([(1, 2, 1)], 1),
    ],
)
def test_every_chunk_once_whoever_is_late(ops: list[tuple[int, ...]], workers: int) -> None:
    assert claims(ops, workers) > 100


@pytest.mark.parametrize(
    ("fault", "ops", "workers"),
    [
        ("no number in the word", [(1,), (2,)], 1),
        ("store instead of swap", [(2,)], 1),
        ("not closed", [(1,), (2,)], 1),
        ("no join", [(2,), (1,)], 1),
        ("no stage wait", [(2, 1)], 1),
    ],
)
def test_a_fault_in_claiming_would_be_found(fault: str, ops: list[tuple[int, ...]], workers: int) -> None:
    with pytest.raises(Violation):
        claims(ops, workers, fault)


@pytest.mark.parametrize(
    ("admitted", "workers", "wakes"),
    [([1, 1, 1], 1, 2), ([2, 2], 2, 1), ([2, 1, 2], 2, 1), ([1, 2], 2, 2), ([3], 3, 1), ([3], 3, 2), ([1, 3], 3, 1)],
)
def test_no_wake_up_is_lost(admitted: list[int], workers: int, wakes: int) -> None:
    assert parking(admitted, workers, wakes) > 20


@pytest.mark.parametrize(
    ("fault", "admitted", "workers"),
    [
        ("looks before it publishes", [1], 1),
        ("does not look again", [1], 1),
        ("leaves a token behind", [1, 1], 1),
        ("wakes nobody else", [2], 2),
    ],
)
def test_a_fault_in_waking_would_be_found(fault: str, admitted: list[int], workers: int) -> None:
    with pytest.raises(Violation):
        parking(admitted, workers, 1, fault)
