# SPDX-License-Identifier: Apache-2.0
"""The thread team as Python sees it: how many lanes, what this box's profile says, and the counters.

The team itself is ``csrc/team.c``. It makes no thread before a product first wants one. What is set here: limits
that are not CPUs (a cgroup quota, ``TUNEKIT_THREADS``, :class:`threads`) and the numbers of the box profile.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import math
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex, TypeVar

from tunekit import _profile, paths
from tunekit._lock import lock
from tunekit.core import core
from tunekit.cpu import this_box, this_cpu
from tunekit.cpu.quota import cgroup_quota
from tunekit.environment import settings

log = logging.getLogger("tunekit")

_Function = TypeVar("_Function", bound=Callable[..., Any])

_QUOTA_SPIN_US = 50
"""Under a quota, time that a worker spins away is time that a product lacks."""

_MOST = 1 << 16
"""Lanes that anybody may ask for; more are as many."""


_started: list[_profile.Profile] = []
_limits: list[weakref.ref[_Limit]] = []
_own_limit = -1  # the profile's dispatch_worker_limit


@dataclass(frozen=True, eq=False)
class _Limit:
    """A limit, in force while the :class:`threads` that holds it is alive, and the thread whose block it is."""

    lanes: int
    thread: int


def _forget_other_threads() -> None:
    """In a child: the blocks of threads that it does not have will never end."""
    with lock:
        _keep(lambda limit: limit.thread == threading.get_ident())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


def profile_path() -> Path:
    """Where this box's profile is read and written: ``TUNEKIT_BOX_PROFILE``, or beside the user's manifests."""
    named = settings().box_profile
    return paths.expand(named) if named else paths.state_folder(this_box().key) / _profile.FILE


def profile() -> _profile.Profile:
    """This box's profile as its file has it now: the user's, or else the machine's."""
    box = this_box()
    found = _profile.load(profile_path(), box)
    if settings().box_profile:
        if not found.found:
            missing = f"TUNEKIT_BOX_PROFILE names {found.path}, which does not exist; the defaults apply"
            return _profile.Profile(found.path, problems=(missing,), found=False)
    elif not found.found:
        machine = (_profile.load(folder / _profile.FILE, box) for folder in paths.site_folders(box.key))
        return next((site for site in machine if site.found), found)
    return found


def start() -> tuple[str, ...]:
    """Configure the core's team, once per process; returns what the operator should hear of.

    Called when a kernel's row is first chosen. Asks for the AMX permission first: a thread that exists
    before it was granted may not use tiles.
    """
    own = core()
    if own is None:
        return ()
    if _started:
        return ()
    with lock:  # whoever comes meanwhile waits, so that nobody's product escapes a limit
        if _started:
            return ()
        this_cpu()
        found = profile()
        apply(own, found)
        _started.append(found)  # last: a start that was interrupted is begun again
        return found.problems


def apply(own: Any, found: _profile.Profile) -> None:
    """Set the core's numbers: the defaults, a profile's, and the limits of this process."""
    global _own_limit
    for knob in _profile.KNOBS:
        if knob.name not in ("threads", "dispatch_worker_limit"):
            own.set_knob(knob.name, found.knobs.get(knob.name, knob.default))
    for name, value in found.knobs.items():
        _say(f"box profile: {name} = {value}{' (advice)' if name == 'threads' else ''} ({found.path})")
    asked = settings().threads
    ceilings = [] if asked is None else [min(asked, _MOST)]
    quota = cgroup_quota() if sys.platform == "linux" else None
    if quota is not None:
        ceilings.append(max(1, math.floor(quota)))
        if "team_spin_us" not in found.knobs:
            own.set_knob("team_spin_us", _QUOTA_SPIN_US)
        _say(f"a cgroup leaves this process {quota:g} CPUs: {ceilings[-1]} lanes, and short spinning")
    own.set_knob("ceiling", min(ceilings, default=0))
    _own_limit = found.knobs.get("dispatch_worker_limit", -1)
    with lock:
        _limit(own)
    if settings().team_prof:
        own.set_knob("team_prof", 1)
        atexit.register(_print_counts)


def _say(line: str) -> None:
    log.info("%s", line)
    if "profile" in settings().log:
        print(f"tunekit: {line}", file=sys.stderr)


def _limit(own: Any) -> None:
    """Set the worker limit: the least of the profile's and of all limits that are in force. Under the lock."""
    limits = [limit.lanes - 1 for ref in _limits if (limit := ref()) is not None]
    if _own_limit >= 0:
        limits.append(_own_limit)
    own.set_knob("dispatch_worker_limit", min(limits, default=-1))


class threads(contextlib.ContextDecorator):
    """Let products use at most so many lanes, the calling thread among them, while the block runs.

    ::

        with tunekit.threads(2):
            y = q8.matmul(x, m)

    It holds for the whole process, whichever thread asked. Where several are in force, nested or in different
    threads, the least one counts. Workers above the limit sleep. It also decorates a function; in a generator or a
    coroutine, whose body runs later, write the block inside.

    Args:
        n: lanes, 1 or more. More than there are CPUs (or than ``TUNEKIT_THREADS``) is no more than there are.

    Raises:
        TypeError: no whole number; or it decorates a generator or a coroutine.
        ValueError: less than 1.
    """

    def __init__(self, n: SupportsIndex) -> None:
        try:
            number = operator.index(n)
        except TypeError:
            raise TypeError(f"threads takes a whole number, not {type(n).__name__}") from None
        if number < 1:
            raise ValueError(f"threads takes 1 or more, not {number}")
        self._n = min(number, _MOST)
        self._held: list[_Limit] = []

    def __call__(self, func: _Function) -> _Function:
        if inspect.isgeneratorfunction(func) or inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(
                f"threads cannot decorate {func.__qualname__}, whose body runs later: "
                f"write `with tunekit.threads({self._n}):` inside it"
            )
        return super().__call__(func)

    def _recreate_cm(self) -> threads:
        return threads(self._n)  # a decorated function has one for each call

    def __enter__(self) -> threads:
        lanes()  # configured first, so that the start does not undo the limit
        limit = _Limit(self._n, threading.get_ident())
        try:
            self._held.append(limit)
            with lock:
                _limits.append(weakref.ref(limit))
                _relimit()
        except BaseException:  # a signal handler's: the block will not begin, and so not end
            self._end(limit)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self._held[-1])

    def _end(self, limit: _Limit) -> None:
        self._held.remove(limit)
        _keep(lambda other: other is not limit)


def _keep(stays: Callable[[_Limit], bool]) -> None:
    with lock:
        _limits[:] = [ref for ref in _limits if (limit := ref()) is not None and stays(limit)]
        _relimit()


def _relimit() -> None:
    own = core()
    if own is not None:
        _limit(own)


def lanes() -> int:
    """How many lanes a large product may have at this moment, the calling thread among them; 1 where nothing is built.

    The CPUs of the calling thread's affinity mask, less what a cgroup quota, ``TUNEKIT_THREADS`` and
    :class:`threads` take away.
    """
    for problem in start():
        log.warning("%s", problem)
    own = core()
    if own is None:
        return 1
    # A block that a signal's exception ended on its way out is no longer in force.
    _keep(lambda limit: True)
    return int(own.team_live())


def counts(reset: bool = False) -> dict[str, int]:
    """The team's counters, which count under ``TUNEKIT_TEAM_PROF=1``; {} where nothing is built.

    ``ops`` went to the team in ``chunks``, of which the callers ran ``own_chunks``; ``solo`` ran inline because one
    lane was enough, ``busy`` because the team had another op. ``publish_ns``, ``serve_ns`` and ``join_ns`` are the
    callers' time in ``ops``; in ``reacted`` ops workers got chunks, the first after ``first_ns`` and the last to get
    its first one after ``last_ns``. Sums of nanoseconds.
    """
    own = core()
    return dict(own.team_counts(reset)) if own is not None else {}


def _print_counts() -> None:
    found = counts()
    ops, reacted = max(found["ops"], 1), max(found["reacted"], 1)
    print(
        f"tunekit: team: {found['ops']} ops of {found['chunks']} chunks ({found['own_chunks']} the callers'), "
        f"{found['solo']} solo, {found['busy']} inline beside another; ns an op: publish {found['publish_ns'] // ops}, "
        f"serve {found['serve_ns'] // ops}, join {found['join_ns'] // ops}; first worker after "
        f"{found['first_ns'] // reacted}, last after {found['last_ns'] // reacted}",
        file=sys.stderr,
    )


def forget() -> None:
    """Configure again at the next use (after a probe, and between tests)."""
    global _own_limit
    with lock:
        _started.clear()
        _own_limit = -1
    own = core()
    if own is not None:
        for knob in _profile.KNOBS:
            if knob.name != "threads":
                own.set_knob(knob.name, knob.default)
        own.set_knob("ceiling", 0)
        own.set_knob("team_prof", 0)
        with lock:
            _limit(own)  # blocks that are in force stay so
    atexit.unregister(_print_counts)
