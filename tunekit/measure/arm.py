# SPDX-License-Identifier: Apache-2.0
"""One arm of a confirmation: ``python -m tunekit.measure.arm FD PARENT``, a fresh process in which one row is pinned.

One request comes as a JSON line on standard input; JSON lines go to descriptor FD, since whatever a family prints is no
answer.

    parent -> arm   {"load": "module:function", "args": [...], "passes": n}
    arm -> parent   {"ready": true} | {"error": text}
    arm -> parent   {"times": {part: [seconds, ...]}, "ran": null | {"row": suffix, "tier": tier, "seats": {...}}}

``module:function(*args)`` returns the :class:`~tunekit.measure.fixtures.Chain` and a witness: a function that says
which row is in force in this process, or None where the kernel was never used. It is asked after the last pass.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunekit.environment import for_child
from tunekit.errors import GateError, told
from tunekit.measure import gate
from tunekit.measure.child import channel, load
from tunekit.measure.confirm import Arm, ArmFailed, Times
from tunekit.measure.fixtures import Chain
from tunekit.measure.race import Deadline

PASSES = 2
SECONDS = 180.0

Witness = Callable[[], "Mapping[str, Any] | None"]


def serve(request: Mapping[str, Any], answer: Callable[..., None]) -> None:
    """Run the chain's parts in turns, one warm pass and then those that count."""
    try:
        chain, witness = load(request["load"], request["args"])
        run = chain.prepare()
    except BaseException as error:
        answer(error=told(error))
        return
    answer(ready=True)
    times: dict[str, list[float]] = {part.name: [] for part in chain.parts}
    for count in range(1 + int(request["passes"])):
        for part in chain.parts:
            start = time.perf_counter()
            often = run(part.name) or 1
            if count:
                times[part.name].append((time.perf_counter() - start) / often)
    answer(times=times, ran=witness())


def run_arm(
    job: gate.Job,
    arm: Arm,
    pins: Mapping[str, str],
    chain: Chain,
    deadline: Deadline,
    passes: int = PASSES,
    seconds: float = SECONDS,
) -> Times:
    """Start an arm, wait for it, and believe it only where it proves what it ran.

    Args:
        job: what the arm loads.
        arm: what must run.
        pins: what is pinned for it, ``scope.name`` to row.
        chain: whose parts it must time.
        deadline: when to end it.
        passes: that count.
        seconds: that it may take, start and loading included.

    Raises:
        ArmFailed: it could not be started, died, hung, said nothing or nonsense, or ran something else.
    """
    environment = {
        **for_child(),
        "TUNEKIT_MODE": "normal",
        "TUNEKIT_MANIFEST": "",
        "TUNEKIT_POLICY": "fallback",
        "TUNEKIT_PIN": ",".join(f"{name}={row}" for name, row in pins.items()),
    }
    request = {"load": job.load, "args": list(job.args), "passes": passes}
    try:
        with gate.Process("tunekit.measure.arm", environment) as process:
            process.send(request)
            last: dict[str, Any] = {}
            end = Deadline(seconds)
            while "times" not in last:
                last = process.receive(end.left(), deadline)
                if "error" in last:
                    raise ArmFailed(f"it could not begin: {last['error']}")
    except gate.OutOfTime:
        raise ArmFailed("the time limit came") from None
    except gate.ChildDied as error:
        raise ArmFailed(str(error)) from None
    except GateError as error:
        raise ArmFailed(str(error)) from None
    return _believe(last, arm, chain)


def _believe(answer: Mapping[str, Any], arm: Arm, chain: Chain) -> Times:
    ran, times = answer.get("ran"), answer.get("times")
    if not isinstance(ran, dict):
        raise ArmFailed("it never ran the kernel")
    want = {"row": arm.row, "tier": "c", "seats": dict(arm.seats)}
    if ran != want:
        got = Arm(str(ran.get("row")), ran["seats"] if isinstance(ran.get("seats"), dict) else {})
        raise ArmFailed(f"it ran {got.label} ({ran.get('tier')}), not {arm.label}")
    parts = {part.name for part in chain.parts}
    if not isinstance(times, dict) or set(times) != parts:
        raise ArmFailed("it timed other parts than it was asked for")
    for name, passes in times.items():
        if not isinstance(passes, list) or not passes or not all(isinstance(t, float) and 0 < t < 1e6 for t in passes):
            raise ArmFailed(f"its times of {name} are none")
    return times


def main(argv: Sequence[str]) -> int:
    """Run the process; see the module."""
    with channel(argv) as parent:
        request = json.loads(parent.requests.readline() or "null")
        if not isinstance(request, dict):
            return 1
        serve(request, parent.answer)
    return 0


__all__ = ["PASSES", "SECONDS", "Witness", "main", "run_arm", "serve"]

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
