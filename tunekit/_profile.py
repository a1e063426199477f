# SPDX-License-Identifier: Apache-2.0
"""The box profile: numbers of dispatch that belong to one machine, in ``box_profile.json`` beside its manifests.

``KNOBS`` is the one list: the core's names, their defaults and ranges, what they mean (docs/team.md is made from it)
and what mints them. A profile is data that may be old, torn or from elsewhere: whatever is wrong with it is said and
left out, and a product runs with the defaults. None of the numbers can change a bit of any result.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunekit import paths
from tunekit.cpu.box import Box

FILE = "box_profile.json"
VERSION = 1
_TOO_LARGE = 1 << 20
_MOST_PROBLEMS = 20


@dataclass(frozen=True)
class Knob:
    """One number of the profile: the least and the greatest value that it takes, and what it means."""

    name: str
    default: int
    low: int
    high: int
    minted: str
    meaning: str


# fmt: off
KNOBS: tuple[Knob, ...] = (
    Knob("target_chunk_work", 1_000_000, 1, 1 << 40, "per-chunk slope",
         "multiply-accumulates that are worth a lane: below twice as many, a product runs on one"),
    Knob("wake_work", 2_000_000, 0, 1 << 40, "parked ladder",
         "multiply-accumulates that are worth waking workers, in one product or in a row; fewer go to who is awake"),
    Knob("gemv_lane_cap", 0, 0, 256, "streaming ladder",
         "lanes of a product with one token at most; 0: no cap"),
    Knob("batch_lane_cap", 0, 0, 256, "by hand", "lanes of a product with more tokens at most; 0: no cap"),
    Knob("batch_grid_2d", 2, 0, 2, "A/B",
         "cut tokens too where the rows alone starve the lanes: 0 never, 1 fine, 2 in whole waves"),
    Knob("dispatch_worker_limit", -1, -1, 255, "by hand",
         "workers beside the caller; those above it sleep apart; -1: no limit, 0: the caller alone"),
    Knob("team_rank_gate", 1, 0, 1, "A/B", "an op invites no more workers than have a chunk to get"),
    Knob("gemv_wave_fill", 1, 0, 1, "by hand",
         "a product with one token that has chunks for half the lanes or more gets one for each"),
    Knob("matmul_min_chunk_rows", 16, 0, 1 << 20, "by hand", "rows of weights in a chunk, at least"),
    Knob("matmul_min_chunk_rows_gemv", 64, 0, 1 << 20, "by hand", "the same for one token"),
    Knob("q8_batch_chunks_per_job", 4, 1, 64, "by hand", "chunks a lane, so that a slow lane can be helped"),
    Knob("q8_gemv_chunks_per_job", 1, 1, 64, "by hand", "the same for one token"),
    Knob("q8_token_block", 128, 1, 65536, "token ladder", "tokens that meet a group of rows before the next, at most"),
    Knob("q8_l2_budget", 4 << 20, 1 << 10, 1 << 40, "token ladder", "bytes of prepared activations in such a block"),
    Knob("act_threshold", 16_384, 1, 1 << 40, "by hand", "activations that are worth a chunk of quantising"),
    Knob("team_spin_us", 2000, 0, 10_000_000, "by hand", "microseconds that an idle worker watches before it parks"),
    Knob("team_join_poll", 2000, 0, 1 << 30, "by hand",
         "rounds that a lane polls for the others before it yields its CPU"),
    Knob("threads", 0, 0, 256, "by hand", "advice, logged and not obeyed: lanes that suit this machine; 0: none"),
)
# fmt: on

BY_NAME = {knob.name: knob for knob in KNOBS}


@dataclass(frozen=True)
class Profile:
    """What a file said.

    Attributes:
        path: the file.
        knobs: the numbers that apply.
        problems: what was wrong, a sentence each.
        found: whether there is such a file.
        refused: why nothing of it counts: ``damaged``, ``another box``, or empty.
        measured: what its numbers came from, as the probe wrote it.
    """

    path: Path
    knobs: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    found: bool = True
    refused: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)


def check(knobs: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Numbers that are legal, and a sentence for each that is not."""
    legal: dict[str, int] = {}
    problems: list[str] = []
    for number, (name, value) in enumerate(knobs.items()):
        knob = BY_NAME.get(name)
        if len(problems) == _MOST_PROBLEMS:
            problems.append(f"and so on: {len(knobs) - number} more were not looked at")
            break
        if knob is None:
            near = difflib.get_close_matches(name[:60], BY_NAME, 1)
            problems.append(f"{name!r:.60} is no knob" + (f" (did you mean {near[0]!r}?)" if near else ""))
        elif isinstance(value, bool) or not isinstance(value, int):
            problems.append(f"{name} must be a whole number, not {value!r:.60}")
        elif not knob.low <= value <= knob.high:
            problems.append(f"{name} = {value} is not between {knob.low} and {knob.high}")
        else:
            legal[name] = value
    return legal, problems


def parse(text: str, path: Path, box: Box) -> Profile:
    """A profile from its text. Pure: nothing is raised, what is wrong is among the problems."""

    def damaged(what: str) -> Profile:
        return Profile(path, problems=(f"{path} {what}; it is ignored",), refused="damaged")

    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        return damaged(f"is not JSON ({error})")
    if not isinstance(data, dict) or not isinstance(data.get("knobs"), dict):
        return damaged("holds no object 'knobs'")
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        return damaged(f"has version {version!r:.60}, not {VERSION}")
    if "box" in data:
        try:
            other = Box.from_json(data["box"])
        except ValueError as error:
            return damaged(f"names no box: {error}")
        if other.key != box.key:
            return Profile(
                path,
                problems=(
                    f"{path} is the profile of another box, {other.key}, and this one is {box.key}: it is ignored; "
                    f"for one of this box: python -m tunekit probe",
                ),
                refused="another box",
            )
    legal, problems = check(data["knobs"])
    measured = data.get("measured")
    told = tuple(f"{path}: {problem}; the default applies" for problem in problems)
    return Profile(path, legal, told, measured=measured if isinstance(measured, dict) else {})


def load(path: Path, box: Box) -> Profile:
    """The profile in a file; one that is not there says nothing, and is no problem."""
    try:
        text = paths.read_small(path, _TOO_LARGE).decode("utf-8")
    except FileNotFoundError:
        return Profile(path, found=False)
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror or error}); it is ignored"
        return Profile(path, problems=(problem,), refused="damaged")
    except UnicodeDecodeError as error:
        return Profile(path, problems=(f"{path} is not UTF-8 text ({error}); it is ignored",), refused="damaged")
    return parse(text, path, box)


def save(path: Path, box: Box, knobs: Mapping[str, int], measured: Mapping[str, Any]) -> None:
    """Write a profile, whole or not at all.

    Raises:
        ValueError: a number that :func:`check` refuses.
        OSError: the file cannot be written.
    """
    legal, problems = check(knobs)
    if problems:
        raise ValueError("; ".join(problems))
    data = {"version": VERSION, "box": box.to_json(), "knobs": legal, "measured": dict(measured)}
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def knob_table() -> str:
    """The knobs as a Markdown table (the source of ``docs/team.md``)."""
    lines = ["| knob | default | from, to | minted by | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{k.name}` | {k.default} | {k.low}, {k.high} | {k.minted} | {k.meaning} |" for k in KNOBS]
    return "\n".join(lines) + "\n"
