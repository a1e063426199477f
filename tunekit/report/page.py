# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page: style and charts inside, no script, nothing fetched. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from tunekit.ceilings import size_name
from tunekit.console import seconds
from tunekit.measure.record import KernelRecord, RunRecord
from tunekit.report import charts
from tunekit.report.charts import figure
from tunekit.report.markup import Markup, join, tag
from tunekit.report.reading import (
    GMACS,
    TAKEN,
    Race,
    Roof,
    confirmations,
    groups,
    no_roof,
    races,
    rates,
    reads,
    roofs,
    stages,
)
from tunekit.report.sources import Source

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def percent(value: float | None) -> str:
    """A fraction as ``7.3 %``, or a dash."""
    return "–" if value is None else f"{100 * value:.1f} %"


def box_key(box: Mapping[str, Any]) -> str:
    """A recorded box in short."""
    parts = [str(box.get(name, "?")) for name in ("arch", "vendor", "family", "model", "stepping")]
    return "-".join(parts) + (f" ({box['core']})" if box.get("core") else "")


def table(title: str, headers: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], kinds: str) -> Markup:
    """A table in a box of its own that scrolls where the page is narrow.

    Args:
        title: the caption.
        headers: the columns' names; all empty for none.
        rows: (class, cells) each.
        kinds: one letter a column: ``n`` a name, ``r`` a number, ``w`` words.
    """
    classes = {"n": "name", "r": "number", "w": "words"}
    head = join(
        tag("th", text, scope="col", class_="number" if k == "r" else None)
        for text, k in zip(headers, kinds, strict=True)
    )
    body = join(
        tag(
            "tr",
            join(tag("td", cell, class_=classes[k]) for cell, k in zip(cells, kinds, strict=True)),
            class_=kind or None,
        )
        for kind, cells in rows
    )
    top = tag("thead", tag("tr", head)) if any(headers) else ""
    inside = tag("table", tag("caption", title), top, tag("tbody", body))
    return tag("div", inside, class_="scroll", tabindex=0, role="region", aria_label=title)


def render(found: Sequence[Source], version: str, problems: Sequence[str] = ()) -> str:
    """The page.

    Args:
        found: the records; at least one.
        version: tunekit's.
        problems: sentences about records that could not be used.
    """
    style = files("tunekit.report").joinpath("style.css").read_text(encoding="utf-8")
    first = found[0].record
    title = f"tunekit report: {', '.join(source.record.scope for source in found)} on {first.brand}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    intro = tag(
        "header",
        tag("h1", "Which rows run on this box, and why"),
        tag("p", f"{first.brand} · {box_key(first.box)} · tunekit {version}", class_="soft"),
        join(tag("p", problem, class_="note") for problem in problems),
    )
    body = join(_scope(source, f"s{number}") for number, source in enumerate(found))
    foot = tag(
        "footer",
        "Made by ",
        tag("code", "python -m tunekit report"),
        ". Every figure was measured on the box named above; times are of one lane, the rows in turns.",
    )
    page = tag("html", head, tag("body", intro, tag("main", body), foot), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _scope(source: Source, name: str) -> Markup:
    record = source.record
    parts: list[Markup] = []
    if source.foreign:
        parts.append(
            tag(
                "p",
                f"This record is of another box than the one that the page was made on: {'; '.join(source.foreign)}.",
                class_="note",
            )
        )
    for number, (kernel_name, kernel) in enumerate(record.kernels.items()):
        parts.append(_kernel(source, kernel_name, kernel, f"{name}k{number}"))
    if not record.kernels:
        parts.append(tag("p", "The record holds no kernel."))
    parts += [_where(record), _stages(record), _reproduce(source)]
    return tag("section", join(parts))


# --- one kernel ------------------------------------------------------------------------------------------


def _kernel(source: Source, title: str, kernel: KernelRecord, name: str) -> Markup:
    found = races(kernel)
    timed = [race for race in found if race.entries]
    parts = [tag("h2", f"{source.record.scope}.{title}"), _verdict(kernel, timed), _facts(kernel, timed)]
    parts += [tag("p", note, class_="note") for note in kernel.notes]
    if timed:
        parts.append(tag("h3", "The race"))
        parts.append(_legend())
    parts += [_race(race, f"{name}r{number}") for number, race in enumerate(timed)]
    if timed:
        parts.append(_all_rows(kernel, timed))
    parts.append(_roofline(source, timed, name))
    parts.append(_confirm(kernel))
    parts.append(_not_raced(kernel))
    return tag("section", join(parts))


def _verdict(kernel: KernelRecord, timed: Sequence[Race]) -> Markup:
    if kernel.winner is None:
        return tag("div", tag("p", "Nothing was chosen", class_="what"), tag("p", kernel.reason), class_="verdict")
    gains = []
    for race in timed:
        entry = race.entry(kernel.winner)
        if entry is not None and entry.ratio is not None:
            gains.append(f"{entry.ratio:.2f}× at {race.name}")
    if kernel.winner == kernel.fallback:
        against = "It is the fallback: what runs untuned, too."
    else:
        against = f"Against the fallback {kernel.fallback}: {', '.join(gains) or 'not compared'}."
    if kernel.previous not in (None, kernel.winner):
        against += f" Before this run: {kernel.previous}."
    return tag(
        "div",
        tag("p", tag("code", kernel.winner), " runs", class_="what"),
        tag("p", kernel.reason[:1].upper() + kernel.reason[1:] + ".") if kernel.reason else "",
        tag("p", against),
        class_="verdict",
    )


def _facts(kernel: KernelRecord, timed: Sequence[Race]) -> Markup:
    counts = {verdict: sum(row.verdict == verdict for row in kernel.rows.values()) for verdict in TAKEN}
    raced = len({entry.suffix for race in timed for entry in race.entries})
    told = [("rows raced", str(raced))]
    told += [(words, str(counts[verdict])) for verdict, words in TAKEN.items() if counts[verdict]]
    told += [(f"noise floor at {race.name}", percent(race.floor)) for race in timed[:1]]
    told += [(f"margin at {race.name}", percent(race.margin)) for race in timed[:1]]
    if not kernel.complete:
        told.append(("finished", "no: cut short"))
    return tag("dl", join(tag("div", tag("dt", name), tag("dd", value)) for name, value in told), class_="facts")


def _legend() -> Markup:
    def sign(mark: Markup, words: str) -> Markup:
        return tag("span", tag("svg", mark, aria_hidden="true"), words)

    band = tag("rect", x=1, y=2, width=16, height=14, class_="band")
    lines = join(
        [
            tag("line", x1=1, x2=17, y1=9, y2=9, class_="spread other"),
            tag("line", x1=5, x2=13, y1=9, y2=9, class_="error other"),
        ]
    )
    return tag(
        "p",
        sign(charts.mark("winner", True, "50%", 9), "winner"),
        sign(charts.mark("fallback", True, "50%", 9), "fallback"),
        sign(charts.mark("", True, "50%", 9), "finalist"),
        sign(charts.mark("", False, "50%", 9), "screening only"),
        sign(Markup(lines), "two standard errors (thick), spread of the samples (thin)"),
        sign(band, "tied with the fastest, by the margin"),
        class_="legend",
    )


def _race(race: Race, name: str) -> Markup:
    begins = "begins at 0" if charts.from_zero(race) else "does not begin at 0"
    words = f"{race.unit}, more is better; the axis {begins}."
    if race.margin is not None:
        words += f" Noise floor {percent(race.floor)}, margin {percent(race.margin)}."
    left_out = len(race.entries) - len(charts.shown(race))
    if left_out:
        words += f" {left_out} slower rows are in the table alone."
    if not race.complete:
        words += " The time limit cut it short."
    return join(
        [
            tag("h4", f"{race.name}: {race.decides}"),
            tag("figure", charts.race_chart(race, name), tag("figcaption", words)),
        ]
    )


def _all_rows(kernel: KernelRecord, timed: Sequence[Race]) -> Markup:
    order = list(dict.fromkeys(entry.suffix for race in timed for entry in race.entries))
    lines = []
    for suffix in order:
        entries = [race.entry(suffix) for race in timed]
        cells = []
        for entry in entries:
            cells += (
                ["–", "–"] if entry is None else [figure(entry.rate), f"±{100 * (entry.high / entry.rate - 1):.1f} %"]
            )
        ratio = entries[0].ratio if entries[0] is not None else None
        row = kernel.rows.get(suffix)
        role = next((entry.role for entry in entries if entry is not None), "")
        verdict = (row.verdict if row else "–") + (" (fallback)" if suffix == kernel.fallback else "")
        lines.append((role, [suffix, *cells, f"{ratio:.2f}×" if ratio else "–", verdict, row.reason if row else ""]))
    headers = ["row"]
    for race in timed:
        headers += [f"{race.name}, {race.unit}", "2 s.e."]
    headers += [f"to fallback at {timed[0].name}", "verdict", "why"]
    kinds = "n" + "rr" * len(timed) + "rww"
    return tag(
        "details",
        tag("summary", f"All {len(lines)} rows that were raced, as a table"),
        table("Rates by row and regime", headers, lines, kinds),
    )


def _roofline(source: Source, timed: Sequence[Race], name: str) -> Markup:
    found = roofs(timed, source.ceilings)
    if not found:
        reason = no_roof(timed, source.ceilings, bool(source.foreign))
        return join([tag("h3", "Against this box's ceilings"), tag("p", reason)]) if reason else Markup()
    instructions = source.ceilings.get("instructions")
    named = instructions if isinstance(instructions, Mapping) else {}
    arithmetic = rates(source.ceilings, "gmacs")
    lines = [
        ("", [f"{leg}: {named.get(leg, '')}", f"{figure(rate)} {GMACS}"])
        for leg, rate in sorted(arithmetic.items(), key=lambda item: -item[1])
    ]
    lines += [
        ("", [f"reading {size_name(size)} again and again", f"{figure(rate)} GB/s"])
        for size, rate in reads(source.ceilings).items()
    ]
    missing = source.ceilings.get("missing")
    for leg, why in missing.items() if isinstance(missing, Mapping) else ():
        lines.append(("", [f"{leg}: not measured: {why}", "–"]))
    words = (
        "One lane, both axes logarithmic. Ceilings: the best of short loops of nothing but that instruction, and of "
        "nothing but reads. A product also folds scales, which the arithmetic ceiling does not count. Signs as above."
    )
    return join(
        [
            tag("h3", "Against this box's ceilings"),
            tag("figure", charts.roofline(timed, found, source.ceilings, f"{name}roof"), tag("figcaption", words)),
            _roof_table(found),
            tag(
                "details",
                tag("summary", "The ceilings, as measured"),
                table("Ceilings of one lane", ["what", "at most"], lines, "wr"),
            ),
        ]
    )


def _roof_table(found: Sequence[Roof]) -> Markup:
    lines = [
        (
            "",
            [
                roof.regime,
                f"{figure(roof.intensity)} MAC/B",
                f"{figure(roof.best)} {GMACS}",
                f"{figure(roof.limit)} {GMACS}",
                f"{100 * roof.best / roof.limit:.0f} %",
                roof.bound if roof.bound == "arithmetic" else f"reading {size_name(roof.size)}",
            ],
        )
        for roof in found
    ]
    headers = ["regime", "intensity", "fastest row", "ceiling", "reached", "bound by"]
    return table("How much of its ceiling each regime reaches", headers, lines, "nrrrrw")


def _confirm(kernel: KernelRecord) -> Markup:
    found = confirmations(kernel)
    if not found:
        return Markup()
    headers = list(dict.fromkeys(key for line in found for key in line))
    rows = [("", [_cell(line.get(key)) for key in headers]) for line in found]
    kinds = "".join(
        "r" if all(isinstance(line.get(key), (int, float, type(None))) for line in found) else "w" for key in headers
    )
    return join(
        [tag("h3", "Confirmed where it is used"), table("End to end, in fresh processes", headers, rows, kinds)]
    )


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_cell(item) for item in value)
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_cell(item)}" for key, item in value.items())
    return str(value)


def _not_raced(kernel: KernelRecord) -> Markup:
    parts = []
    for verdict, words in TAKEN.items():
        found = groups(kernel, verdict)
        if not found:
            continue
        count = sum(len(rows) for _, rows in found)
        lists = join(
            tag("div", tag("h4", f"{reason} ({len(rows)})"), tag("ul", join(tag("li", tag("code", r)) for r in rows)))
            for reason, rows in found
        )
        parts.append(
            tag("details", tag("summary", f"{count} {'row' if count == 1 else 'rows'} {words}, by reason"), lists)
        )
    return join([tag("h3", "Rows that were not raced"), *parts]) if parts else Markup()


# --- the run ---------------------------------------------------------------------------------------------


def _where(record: RunRecord) -> Markup:
    features = record.box.get("features")
    compilers = dict.fromkeys(kernel.compiler for kernel in record.kernels.values() if kernel.compiler)
    rows = [
        ("processor", record.brand),
        ("box", box_key(record.box)),
        ("features", ", ".join(map(str, features)) if isinstance(features, list) else "–"),
        ("compiler", "; ".join(compilers) or "none was used"),
        ("began", record.started or "–"),
        ("ended", record.ended or "–"),
        ("time limit", "none" if record.time_limit is None else seconds(record.time_limit)),
        ("seed of the turns", str(record.seed)),
    ]
    return join(
        [tag("h2", "Box and toolchain"), table("What it was measured on", ["", ""], [("", r) for r in rows], "nw")]
    )


def _stages(record: RunRecord) -> Markup:
    found = stages(record)
    whole = sum(taken for _, taken in found)
    if not whole:
        return Markup()

    def line(name: str, taken: float) -> Markup:
        bar = tag("span", class_="bar", style=f"width:{100 * taken / whole:.1f}%")
        return tag(
            "tr",
            tag("td", name, class_="name"),
            tag("td", seconds(taken), class_="number"),
            tag("td", bar, class_="track", aria_hidden="true"),
        )

    title = f"Where the time went: {seconds(whole)}"
    body = tag("tbody", join(line(name, taken) for name, taken in found))
    return tag(
        "div", tag("table", tag("caption", title), body), class_="scroll", tabindex=0, role="region", aria_label=title
    )


def _reproduce(source: Source) -> Markup:
    record = source.record
    scope = shlex.quote(record.scope)
    limit = "" if record.time_limit is None else f" --time-limit {record.time_limit:g}"
    lines = [f"python -m tunekit.retune --scope {scope} --seed {record.seed}{limit}"]
    for name, kernel in record.kernels.items():
        key = shlex.quote(f"{record.scope}.{name}")
        lines.append(f"python -m tunekit status --why-not {key}")
        if kernel.winner not in (None, "reference"):
            lines.append(f"python -m tunekit show {key} {shlex.quote(str(kernel.winner))} --assembly")
    lines += ["python -m tunekit probe", f"python -m tunekit report --scope {scope}"]
    return join(
        [
            tag("h2", "To do it again"),
            tag("pre", tag("code", "\n".join(lines)), tabindex=0),
            tag("p", "The record, raw samples included: ", tag("code", str(source.path)), class_="soft"),
        ]
    )
