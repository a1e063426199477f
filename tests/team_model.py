# SPDX-License-Identifier: Apache-2.0
"""The team's protocol as a small model, and an explorer that walks through every interleaving of its steps.

The steps are the atomic ones of csrc/team.c, in their order; memory is sequentially consistent (what C11's weaker
orders add is argued there, and watched by the thread sanitizer). A lane that spins is a lane that cannot step until what it watches
has changed. Each model takes the name of a fault to build in, so that the tests can show that it would be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

State = dict[str, Any]
Step = Callable[[State], Iterator[State]]


class Violation(Exception):
    """A state that must not be."""


def explore(start: State, processes: list[Step], final: Callable[[State], None]) -> int:
    """Visit every reachable state; returns how many there are. Raises Violation."""
    seen: set[Any] = set()
    todo = [start]
    while todo:
        state = todo.pop()
        key = tuple(sorted(state.items()))
        if key in seen:
            continue
        seen.add(key)
        steps = 0
        for process in processes:
            for after in process(state):
                steps += 1
                todo.append(after)
        if steps == 0:
            final(state)
    return len(seen)


def changed(state: State, **values: Any) -> State:
    return {**state, **values}


def put(pair: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*pair[:index], value, *pair[index + 1 :])


# --- publish, claim, join --------------------------------------------------------------------------------

CLOSED = 99


def claims(ops: list[tuple[int, ...]], workers: int, fault: str = "") -> int:
    """Ops, each the chunks of its stages, published one after the other; ``workers`` lanes beside the caller.

    Violations: a chunk that runs twice, not at all, for an op that has been joined, with another op's number, or
    before the stage in front of it has ended; a state in which nobody can go on.
    """
    widest = max(len(op) for op in ops)
    start: State = {
        "number": 0,
        "claim": ((0, CLOSED),) * widest,
        "done": ((0, 0),) * widest,
        "stage": ((0, 0),) * widest,  # (the op whose context it is, chunks)
        "count": 0,
        "ran": (),  # (op, stage, chunk) whose chunk has begun
        "ended": (),
        "joined": 0,
        "p": ("close", 1, 0),
        **{f"w{i}": ("watch", 0) for i in range(workers)},
    }

    def serving(state: State, who: str, number: int, leave: tuple[Any, ...]) -> Iterator[State]:
        """One step of serve(): the lane's place is (what, ..., stage, locals)."""
        what, *rest = state[who][1]

        def to(*place: Any, **values: Any) -> State:
            return changed(state, **values, **{who: ("serve", place, *state[who][2:])})

        if what == "count":
            yield to("stage", 0, state["count"], 0)
        elif what == "stage":
            s, count, chunks = rest
            if s >= count:
                yield changed(state, **{who: leave})
            elif s == 0 or fault == "no stage wait":
                yield to("context", s, count)
            else:
                done = state["done"][s - 1]
                if done[0] != number:
                    yield changed(state, **{who: leave})
                elif done[1] == chunks:
                    yield to("context", s, count)
        elif what == "context":
            s, count = rest
            yield to("chunks", s, count, state["stage"][s][0])
        elif what == "chunks":
            s, count, context = rest
            yield to("load", s, count, context, state["stage"][s][1], 0)
        elif what == "load":
            s, count, context, chunks, mine = rest
            word = state["claim"][s]
            if (word[0] != number and fault != "no number in the word") or word[1] >= chunks:
                yield to("done", s, count, chunks, mine)
            else:
                yield to("swap", s, count, context, chunks, mine, word)
        elif what == "swap":
            s, count, context, chunks, mine, word = rest
            if state["claim"][s] != word and fault != "store instead of swap":
                yield to("load", s, count, context, chunks, mine)
                return
            chunk = word[1]
            work = (context, s, chunk)
            if context != number or context <= state["joined"]:
                raise Violation(f"a lane of op {number} runs chunk {chunk} of op {context}, joined: {state['joined']}")
            if work in state["ran"]:
                raise Violation(f"{work} runs twice")
            if s > 0 and sum(1 for o, e, _ in state["ended"] if (o, e) == (context, s - 1)) < ops[context - 1][s - 1]:
                raise Violation(f"{work} runs before stage {s - 1} has ended")
            yield to(
                "run", s, count, context, chunks, mine, chunk,
                claim=put(state["claim"], s, (word[0], word[1] + 1)), ran=(*state["ran"], work),
            )  # fmt: skip
        elif what == "run":
            s, count, context, chunks, mine, chunk = rest
            if context <= state["joined"]:
                raise Violation(f"op {context} was joined while its chunk {chunk} ran")
            # The order in which chunks ended does not matter: kept sorted, so that fewer states differ.
            ended = tuple(sorted((*state["ended"], (context, s, chunk))))
            yield to("load", s, count, context, chunks, mine + 1, ended=ended)
        elif what == "done":
            s, count, chunks, mine = rest
            done = state["done"]
            if mine:
                done = put(done, s, (done[s][0], done[s][1] + mine))
            yield to("stage", s + 1, count, chunks, done=done)

    def publisher(state: State) -> Iterator[State]:
        what, *rest = state["p"]
        if what == "serve":
            yield from serving(state, "p", rest[1], ("join", rest[1]))
            return
        if what == "end":
            return
        op = rest[0]
        stages = ops[op - 1]
        if what == "close":
            s = rest[1]
            if s < widest:
                claim = state["claim"] if fault == "not closed" else put(state["claim"], s, (op, CLOSED))
                yield changed(state, claim=claim, done=put(state["done"], s, (op, 0)), p=("close", op, s + 1))
            else:
                yield changed(state, p=("write", op, 0))
        elif what == "write":
            s = rest[1]
            if s < len(stages):
                yield changed(state, stage=put(state["stage"], s, (op, state["stage"][s][1])), p=("size", op, s))
            else:
                yield changed(state, count=len(stages), p=("open", op, 0))
        elif what == "size":
            s = rest[1]
            yield changed(state, stage=put(state["stage"], s, (op, stages[s])), p=("write", op, s + 1))
        elif what == "open":
            s = rest[1]
            if s < len(stages):
                yield changed(state, claim=put(state["claim"], s, (op, 0)), p=("open", op, s + 1))
            else:
                yield changed(state, number=op, p=("serve", ("count",), op))
        elif what == "join":
            done = state["done"][len(stages) - 1]
            if done == (op, stages[-1]) or fault == "no join":
                yield changed(state, joined=op, p=("close", op + 1, 0) if op < len(ops) else ("end",))

    def worker(who: str) -> Step:
        def step(state: State) -> Iterator[State]:
            what, *rest = state[who]
            if what == "watch":
                if state["number"] != rest[0]:
                    yield changed(state, **{who: ("serve", ("count",), state["number"])})
            else:
                yield from serving(state, who, rest[1], ("watch", rest[1]))

        return step

    def final(state: State) -> None:
        wanted = sorted((o + 1, s, c) for o, op in enumerate(ops) for s, n in enumerate(op) for c in range(n))
        if state["p"] != ("end",):
            raise Violation(f"nobody can go on: {state}")
        if sorted(state["ran"]) != wanted or sorted(state["ended"]) != wanted:
            raise Violation(f"not every chunk ran: {state}")

    # `ran` in order would tell states apart that do not differ.
    def sorted_ran(process: Step) -> Step:
        return lambda state: (changed(after, ran=tuple(sorted(after["ran"]))) for after in process(state))

    return explore(start, [sorted_ran(p) for p in (publisher, *(worker(f"w{i}") for i in range(workers)))], final)


# --- park, wake ------------------------------------------------------------------------------------------


def parking(admitted: list[int], workers: int, wakes: int, fault: str = "") -> int:
    """Ops that invite ``admitted`` ranks each; every worker may park whenever it has nothing to serve.

    Violations: a token for a worker that has one already, or that nobody owes; and, once nobody can step any
    more, a worker that the last op invites and that sleeps without having seen it.
    """
    start: State = {
        "number": 0,
        "invited": 0,
        "asleep": (0,) * workers,
        "token": (0,) * workers,
        "p": ("write", 1),
        **{f"w{i}": ("watch", 0) for i in range(workers)},
    }

    def waking(state: State, who: str, ranks: int, rank: int, left: int, leave: tuple[Any, ...]) -> Iterator[State]:
        """One step of wake(): take a bit, or give the token that is owed for one."""
        while rank < min(ranks, workers) and not state["asleep"][rank]:
            rank += 1
        if rank >= min(ranks, workers) or left == 0:
            yield changed(state, **{who: leave})
            return
        yield changed(state, asleep=put(state["asleep"], rank, 0), **{who: ("give", ranks, rank, left, leave)})

    def giving(state: State, who: str) -> Iterator[State]:
        _, ranks, rank, left, leave = state[who]
        if state["token"][rank]:
            raise Violation(f"a second token for worker {rank}")
        yield changed(
            state, token=put(state["token"], rank, 1), **{who: ("wake", ranks, rank + 1, left - 1, leave)}
        )  # fmt: skip

    def publisher(state: State) -> Iterator[State]:
        what, *rest = state["p"]
        if what == "write":
            op = rest[0]
            after = ("number", op) if fault != "looks before it publishes" else ("wake", admitted[op - 1], 0, wakes, ("number", op))
            yield changed(state, invited=admitted[op - 1], p=after)
        elif what == "number":
            op = rest[0]
            following = ("write", op + 1) if op < len(admitted) else ("end",)
            after = ("wake", admitted[op - 1], 0, wakes, following)
            yield changed(state, number=op, p=following if fault == "looks before it publishes" else after)
        elif what == "wake":
            yield from waking(state, "p", *rest)
        elif what == "give":
            yield from giving(state, "p")

    def worker(rank: int) -> Step:
        who = f"w{rank}"

        def step(state: State) -> Iterator[State]:
            what, *rest = state[who]
            if what == "watch":
                if state["number"] != rest[0]:
                    yield changed(state, **{who: ("watch", state["number"])})  # served, or not invited
                else:
                    yield changed(state, **{who: ("set", rest[0])})
            elif what == "set":
                yield changed(state, asleep=put(state["asleep"], rank, 1), **{who: ("look", rest[0])})
            elif what == "look":
                if state["number"] != rest[0] and fault != "does not look again":
                    yield changed(state, **{who: ("cancel", rest[0])})
                else:
                    yield changed(state, **{who: ("sleep", rest[0])})
            elif what == "cancel":
                if state["asleep"][rank]:
                    yield changed(state, asleep=put(state["asleep"], rank, 0), **{who: ("watch", rest[0])})
                elif fault == "leaves a token behind":
                    yield changed(state, **{who: ("watch", rest[0])})
                else:
                    yield changed(state, **{who: ("sleep", rest[0])})
            elif what == "sleep":
                if state["token"][rank]:
                    token = put(state["token"], rank, 0)
                    after: tuple[Any, ...] = ("watch", rest[0])
                    if rank < state["invited"] and fault != "wakes nobody else":
                        after = ("wake", state["invited"], 0, wakes, after)
                    yield changed(state, token=token, **{who: after})
            elif what == "wake":
                yield from waking(state, who, *rest)
            elif what == "give":
                yield from giving(state, who)

        return step

    def final(state: State) -> None:
        for rank in range(min(admitted[-1], workers)):
            what, seen = state[f"w{rank}"][:2]
            if what != "sleep" or seen != state["number"]:
                raise Violation(f"worker {rank} sleeps through op {state['number']}: {state}")
        if state["p"] != ("end",) or any(state["token"]):
            raise Violation(f"somebody is stuck: {state}")

    return explore(start, [publisher, *(worker(i) for i in range(workers))], final)
