# SPDX-License-Identifier: Apache-2.0
"""How many CPUs' worth of time the control groups of this process leave it (Linux, both versions of cgroups).

A quota is time, not CPUs: lanes beyond it would all run for a part of each period and then all stand still, which a
team that waits for its last chunk feels at once. Read from files alone, below a root that tests can replace.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _mounts(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """(type, options, the group that is mounted, where) of each mount of control groups."""
    for line in _lines(root / "proc/self/mountinfo"):
        left, dash, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if dash and len(fields) > 4 and len(kinds) > 2 and kinds[0] in ("cgroup", "cgroup2"):
            yield kinds[0], kinds[2], fields[3], fields[4].replace("\\040", " ")


def _chain(root: Path, mounted: str, where: str, group: str) -> Iterator[Path]:
    """The folders of a group and of those above it, innermost first."""
    top = root / where.lstrip("/")
    # A container may see its own group as the root, or a path on the host of which the mount shows the end.
    inside = group[len(mounted) :] if mounted != "/" and group.startswith(mounted) else group
    folder = top
    folders = [top]
    for part in Path(inside.lstrip("/")).parts:
        if part in ("..", "/"):
            continue
        folder = folder / part
        folders.append(folder)
    yield from reversed(folders)


def _v2(folder: Path) -> float | None:
    words = " ".join(_lines(folder / "cpu.max")[:1]).split()
    try:
        return int(words[0]) / int(words[1])
    except (IndexError, ValueError, ZeroDivisionError):  # no such file, or "max 100000"
        return None


def _v1(folder: Path) -> float | None:
    try:
        quota = int(_lines(folder / "cpu.cfs_quota_us")[0])
        period = int(_lines(folder / "cpu.cfs_period_us")[0])
        return quota / period if quota > 0 else None
    except (IndexError, ValueError, ZeroDivisionError):
        return None


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """CPUs that the control groups of this process allow, as a number such as 7.65; None without a quota.

    The least of the quotas of its group and of those above it, in version 1 and in version 2.

    Args:
        root: where ``proc/self`` and the mounts are looked for.
    """
    groups: dict[str, str] = {}  # controller, or "" for version 2, to the group's path
    for line in _lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                groups[controller] = parts[2]
    found: list[float] = []
    for kind, options, mounted, where in _mounts(root):
        one = kind == "cgroup"
        if one and "cpu" not in options.split(","):
            continue
        group = groups.get("cpu" if one else "")
        if group is not None:
            quotas = (_v1(folder) if one else _v2(folder) for folder in _chain(root, mounted, where, group))
            found += [quota for quota in quotas if quota is not None and quota > 0]
    return min(found, default=None)
