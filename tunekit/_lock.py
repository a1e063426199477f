# SPDX-License-Identifier: Apache-2.0
"""The one lock around what this process decides once: declarations, modules, choices, limits.

One, because these call each other in every order. It is re-entrant, since a signal handler may ask while its thread
is deciding. A fork waits for it, so that no child begins with half a decision, or half an import, of a thread that
it does not have.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

FORK_WAITS = 10.0
"""Seconds that a fork waits for another thread's decision; after that it goes on, and the child's lock is free."""


class _Lock:
    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self._forks = threading.local()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._in_child
            )

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def _before_fork(self) -> None:
        self._forks.holds = self._lock.acquire(timeout=FORK_WAITS)

    def _after_fork(self) -> None:
        if self._forks.holds:
            self._lock.release()

    def _in_child(self) -> None:
        if self._forks.holds:
            self._lock.release()
        else:
            self._lock = threading.RLock()


lock = _Lock()
