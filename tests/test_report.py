# SPDX-License-Identifier: Apache-2.0
"""The report: figures from a record, a page that is whole, escaped and self-contained, a picture, and what can go wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tunekit import _manifest, cpu, dispatch
from tunekit.__main__ import main
from tunekit.measure.record import ConfirmRecord, KernelRecord, RegimeRecord, RowRecord, RunRecord
from tunekit.report import charts, markup, page, reading, sources

HOSTILE = "</title><script>alert(1)</script>&\"'\x1b[2J\u202e"
CEILINGS = {
    "gmacs": {"maddubs": 90.0, "madd16": 60.0},
    "instructions": {"maddubs": "vpmaddubsw + vpmaddwd + vpaddd"},
    "read_gbs": {"32768": 150.0, "1048576": 70.0, "268435456": 10.0},
    "missing": {"avxvnni": "an old compiler"},
}


def regime(unit: str = "GMAC/s", traffic: float = 1e6, decides: list[str] | None = None, **more: Any) -> RegimeRecord:
    work = 60e6
    times = {"fast": 1e-3, "base": 1.1e-3, "near": 1.02e-3, "slow": 9e-3}
    found = RegimeRecord(
        unit, work, ["*"] if decides is None else decides, floor=0.012, margin=0.03, centres=times,
        errors=dict.fromkeys(times, 0.004), spreads=dict.fromkeys(times, 0.02), finalists=["base", "fast", "near"],
        screening={name: [t] * 5 for name, t in times.items()}, final={"fast": [1e-3] * 15}, traffic=traffic,
    )  # fmt: skip
    return dataclasses.replace(found, **more)


def kernel(**more: Any) -> KernelRecord:
    rows = {
        "fast": RowRecord("winner", "leads"),
        "near": RowRecord("tied", "within the margin"),
        "base": RowRecord("slower", "+10 % time"),
        "slow": RowRecord("slower", "+800 % time"),
        "crash": RowRecord("rejected", f"died of SIGSEGV {HOSTILE}"),
        "wrong": RowRecord("rejected", "3 of 40 differ"),
        "amx1": RowRecord("unavailable", "this CPU lacks amx-int8"),
        "amx2": RowRecord("unavailable", "this CPU lacks amx-int8"),
        "late": RowRecord("unmeasured", "the time limit came before its race"),
    }
    regimes = {"aside": regime(decides=[]), "main": regime()}
    return dataclasses.replace(
        KernelRecord("fast", "base", "base", "leads every other row", notes=["a note"], rows=rows, regimes=regimes,
                     compiler="gcc 12"),
        **more,
    )  # fmt: skip


def record(scope: str = "tunekit", **more: Any) -> RunRecord:
    found = RunRecord(
        scope, cpu.this_box().to_json(), "A Brand", 3, "then", "now", stages={"race main": 2.0, "build": 6.0},
        kernels={"q8q8": kernel()},
    )  # fmt: skip
    return dataclasses.replace(found, **more)


def source(ceilings: Any = CEILINGS, **more: Any) -> sources.Source:
    return sources.Source(Path("/state/x.tune.run.json"), record(**more), (), ceilings)


class Reader(HTMLParser):
    """Tags, text outside the style, and whether every element was closed."""

    VOID = ("meta", "br", "hr")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        raise AssertionError("no tag of ours closes itself")


# --- figures ---------------------------------------------------------------------------------------------


def test_a_race_is_in_order_of_speed_with_band_roles_and_errors() -> None:
    main_, aside = reading.races(kernel())
    assert (main_.name, aside.name) == ("main", "aside")  # the primary first, whatever the file's order
    assert [e.suffix for e in main_.entries] == ["fast", "near", "base", "slow"]
    assert [e.role for e in main_.entries] == ["winner", "", "fallback", ""]
    assert [e.tied for e in main_.entries] == [True, True, False, False]
    fast = main_.entries[0]
    assert fast.rate == pytest.approx(60.0) and fast.ratio == pytest.approx(1.1)
    assert fast.low == pytest.approx(60 / 1.008) and fast.high == pytest.approx(60 / 0.992)
    assert (fast.samples, main_.entries[3].samples) == (15, 5)
    assert main_.band == pytest.approx((60 / 1.03, 60.0))
    assert main_.intensity == pytest.approx(60.0) and aside.decides == "reported only"


def test_the_roof_is_the_lower_of_two_ceilings_at_the_size_that_is_read() -> None:
    low = dataclasses.replace(kernel(), regimes={"a": regime(), "b": regime(traffic=60e6)})
    arithmetic, read = reading.roofs(reading.races(low), CEILINGS)
    assert (arithmetic.bound, arithmetic.limit, arithmetic.size) == ("arithmetic", 90.0, 1 << 20)
    assert (read.bound, read.limit, read.size) == ("reading", 10.0, 268435456)


@pytest.mark.parametrize(
    ("one", "ceilings", "foreign", "words"),
    [
        (regime(unit="Gword/s"), CEILINGS, False, "counts Gword/s"),
        (regime(traffic=0), CEILINGS, False, "traffic="),
        (regime(), {}, False, "python -m tunekit probe"),
        (regime(), {"problem": "no compiler"}, False, "(no compiler)"),
        (regime(), {}, True, "another box"),
        (regime(), {"gmacs": {"x": "many"}, "read_gbs": 3}, False, "python -m tunekit probe"),
        (regime(), CEILINGS, False, ""),
    ],
)
def test_where_there_is_no_roofline_the_page_says_why(
    one: RegimeRecord, ceilings: Any, foreign: bool, words: str
) -> None:
    found = reading.no_roof(reading.races(kernel(regimes={"main": one})), ceilings, foreign)
    assert words in found and bool(found) == bool(words)
    assert (
        "roofline" in page.render([source(ceilings, kernels={"k": kernel(regimes={"main": one})})], "1")
    ) or not words


def test_rows_that_were_not_raced_are_grouped_by_reason() -> None:
    assert reading.groups(kernel(), "unavailable") == [("this CPU lacks amx-int8", ["amx1", "amx2"])]
    assert [len(rows) for _, rows in reading.groups(kernel(), "rejected")] == [1, 1]


def test_the_axis_begins_at_zero_where_many_rows_are_far_behind() -> None:
    (near, *_) = reading.races(kernel())
    assert not charts.from_zero(near)  # one of four is
    slow = regime(centres={"fast": 1e-3, "base": 3e-3, "near": 1.02e-3, "slow": 9e-3})
    (far, *_) = reading.races(kernel(regimes={"main": slow}))
    assert charts.from_zero(far) and "below this axis" not in charts.race_chart(far, "x")
    assert "below this axis" in charts.race_chart(near, "x")
    assert "begins at 0" in page.render([source(kernels={"k": kernel(regimes={"main": slow})})], "1")


def test_figures_and_ticks() -> None:
    assert [charts.figure(v) for v in (0, 0.00123, 0.5, 9.5, 66, 123.4, 12345)] == [
        "0", "1.2e-03", "0.500", "9.50", "66.0", "123", "12,345",
    ]  # fmt: skip
    assert charts.ticks(32, 68) == [40, 50, 60] and charts.ticks(5, 5) == [5]
    assert charts.decades(0.4, 12) == [0.5, 1, 2, 5, 10]
    assert charts.shorten("a" * 50, 11) == "aaaaa…aaaaa" and charts.shorten("short", 11) == "short"


# --- the page --------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_needs_nothing_from_elsewhere() -> None:
    text = page.render([source()], "9.9")
    reader = Reader(text)
    assert reader.open == []
    names = {name for name, _ in reader.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "base", "form", "image", "use"}
    for _, attributes in reader.tags:
        assert not {a for a in attributes if a.startswith("on") or a in ("src", "href", "xlink:href", "srcset")}
    assert "url(" not in text and "@import" not in text and "http://" not in text and "https://" not in text
    assert "default-src 'none'" in dict(reader.tags)["meta"].values() or "default-src" in text
    for word in ("fast", "Leads every other row.", "a note", "gcc 12", "A Brand", "--seed 3", "9.9", "3.0 %", "build"):
        assert word in reader.text, word


def test_every_chart_is_xml_with_a_title_and_a_description_and_ids_that_are_its_own() -> None:
    text = page.render([source(), source(scope="other")], "1")
    drawn = re.findall(r'<svg role="img".*?</figure>', text, re.S)
    assert len(drawn) == 2 * 3
    for chart in drawn:
        root = ElementTree.fromstring(chart.partition("<figcaption")[0])
        title, desc = root.find("title"), root.find("desc")
        assert title is not None and desc is not None and title.text and desc.text
        assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def test_text_of_others_stays_text() -> None:
    odd = dataclasses.replace(
        kernel(regimes={HOSTILE: regime(unit=HOSTILE)}, notes=[HOSTILE], reason=HOSTILE, compiler=HOSTILE),
        rows={**kernel().rows, HOSTILE: RowRecord(HOSTILE, HOSTILE)},
    )
    ceilings = {**CEILINGS, "gmacs": {HOSTILE: 90.0}, "missing": {HOSTILE: HOSTILE}}
    found = source(ceilings, brand=HOSTILE, scope=HOSTILE, kernels={HOSTILE: odd}, stages={HOSTILE: 1.0})
    text = page.render([dataclasses.replace(found, foreign=(HOSTILE,))], HOSTILE, [HOSTILE])
    reader = Reader(text)
    assert reader.open == [] and "<script" not in text.lower() and "\x1b" not in text and "\u202e" not in text
    assert "<script>alert(1)</script>" in reader.text  # to read
    assert markup.escape("\ud800<") == "?&lt;"


def test_what_is_missing_from_a_record_is_no_error() -> None:
    bare = KernelRecord(None, None, None, "no row can run on this box")
    empty = KernelRecord("fast", None, "fast", regimes={"main": RegimeRecord("GMAC/s", 1.0, ["*"])})
    late = kernel(complete=False, regimes={"main": regime(floor=None, margin=None, complete=False)})
    one = kernel(regimes={"main": regime(centres={"fast": 1e-3}, errors={}, spreads={}, traffic=1.0)})
    for kernels in ({}, {"a": bare}, {"a": empty}, {"a": late}, {"a": one}):
        found = source(kernels=kernels, stages={}, box={"arch": 3})
        assert Reader(page.render([found], "1")).open == []
        json.dumps(reading.as_json("x", found.record, (), CEILINGS), allow_nan=False)
    assert "Nothing was chosen" in page.render([source(kernels={"a": bare})], "1")
    assert "no: cut short" in page.render([source(kernels={"a": late})], "1")


def test_confirm_ratios_are_shown() -> None:
    one = ConfirmRecord("a <model>", "*", "fast", "base", "rejected", "no", 1.043, 0.02, [1.5, 2.0], {"prefill": 0.987})
    none = ConfirmRecord("another", "*", "fast", "base", "unusable", "it died")
    reader = Reader(page.render([source(kernels={"a": kernel(confirm=[one, none])})], "1"))
    for words in ("a <model>", "1.043", "1.5, 2", "prefill 0.987", "it died"):
        assert words in reader.text
    assert "Confirmed" not in page.render([source()], "1")


# --- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of the scope ``tunekit`` on this box; its file."""
    monkeypatch.setattr(dispatch, "installed_scopes", lambda: {"tunekit": "tunekit.q8.kernels"})
    path = _manifest.record_path(_manifest.user_path("tunekit"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record().to_json(), sort_keys=True), encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["report", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_page_is_written_whole_over_an_older_one(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys) == (0, f"{tmp_path}/tunekit-report.html\n", "")
    target = tmp_path / "there.html"
    target.write_text("old", encoding="utf-8")
    link = tmp_path / "link.html"
    link.symlink_to(target)
    mask = os.umask(0o022)
    try:
        assert run(capsys, "--output", str(link), "--scope", "tunekit")[0] == 0
    finally:
        os.umask(mask)
    assert link.is_symlink() and target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(target.stat().st_mode) == 0o644  # to be shared, as any new file
    assert not list(tmp_path.glob(".*.new"))


def test_json_gives_figures_and_writes_no_page_unasked(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "--json")
    answer = json.loads(out)
    assert status == 0 and answer["output"] is None and not list(tmp_path.glob("*.html"))
    (scope,) = answer["scopes"]
    assert scope["kernels"]["q8q8"]["races"][0]["entries"][0]["suffix"] == "fast" and scope["foreign"] == []
    assert scope["kernels"]["q8q8"]["not_raced"]["unavailable"] == {"this CPU lacks amx-int8": ["amx1", "amx2"]}
    status, out, _ = run(capsys, "--output", "-")
    assert status == 0 and out.startswith("<!DOCTYPE html>")


def test_no_record_names_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(capsys, "--scope", "tunekit", "--output", str(tmp_path / "x.html"))
    assert status == 2 and "python -m tunekit.retune --scope tunekit" in err
    status, _, err = run(capsys, "--scope", "nobody")
    assert status == 2 and "no scope 'nobody'" in err
    status, _, err = run(capsys, "--record", str(tmp_path / "none.json"))
    assert status == 2 and "there is no run record" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": 1, "scope"', "is torn or no JSON"),
        ("", "is torn or no JSON"),
        ("[" * 100_000, "is torn or no JSON"),
        ("\udcff", "is torn or no JSON"),
        ('{"schema": 99}', "schema 99; this tunekit reads 1"),
        ('{"schema": 1, "scope": "x"}', "box is missing"),
    ],
)
def test_a_torn_record_is_named(
    text: str, words: str, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.write_bytes(text.encode("utf-8", "surrogateescape"))
    status, _, err = run(capsys, "--output", str(tmp_path / "x.html"))
    assert status == 2 and words in err and str(recorded) in err and "python -m tunekit.retune" in err
    assert not (tmp_path / "x.html").exists()


def test_a_record_of_another_box_is_said_on_the_page(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record(box={**cpu.this_box().to_json(), "model": 99}).to_json()), encoding="utf-8")
    status, out, _ = run(capsys, "--record", str(other), "--output", "-")
    assert status == 0 and "another box" in out and f"model: {cpu.this_box().model} here, 99 there" in out
    assert run(capsys, "--record", str(other), "--scope", "tunekit")[0] == 2


def test_a_place_that_cannot_be_written_is_named(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.html", "No such file or directory")):
        status, _, err = run(capsys, "--output", str(place))
        assert status == 2 and words in err and "Traceback" not in err
    status, _, err = run(capsys, "--output", "/dev/full")
    assert status == 2 and "No space left" in err
    status, _, err = run(capsys, "--output", "-", "--json")
    assert status == 2 and "--json" in err


def test_ceilings_come_from_the_profile_of_this_box(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tunekit import _profile, team

    _profile.save(team.profile_path(), cpu.this_box(), {}, {"ceilings": CEILINGS})
    answer = json.loads(run(capsys, "--json")[1])
    assert [roof["bound"] for roof in answer["scopes"][0]["kernels"]["q8q8"]["roofs"]] == ["arithmetic"] * 2
    path = team.profile_path()
    path.write_text(path.read_text().replace(cpu.this_box().vendor, "Other"), encoding="utf-8")
    assert json.loads(run(capsys, "--json")[1])["scopes"][0]["ceilings"] == {}


# --- the picture -----------------------------------------------------------------------------------------


def test_the_picture_is_a_png_with_and_without_a_roofline() -> None:
    pytest.importorskip("matplotlib")
    from tunekit.report import picture

    odd = {"$k": kernel(regimes={"$\\frac{": regime(unit="$x^$")})}
    for found in (source(), source({}), source({}, kernels=odd)):
        assert picture.draw([found]).startswith(b"\x89PNG\r\n")


def test_without_the_extra_its_name_is_said_before_anything_is_written(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run(capsys, "--output", str(tmp_path / "x.html"), "--png", str(tmp_path / "x.png"))
    assert status == 2 and "pip install 'tunekit-native[report]'" in err and not (tmp_path / "x.html").exists()


def test_a_reader_that_goes_away_is_no_error(recorded: Path) -> None:
    command = [sys.executable, "-m", "tunekit", "report", "--record", str(recorded), "--output", "-"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_page_goes_into_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record().to_json()))
    code = (
        "import sys; from tunekit.__main__ import main\n"
        f"sys.exit(main(['report', '--record', {str(path)!r}, '--output', sys.argv[1]]))"
    )
    pages = set()
    for name in ("-", "/dev/stdout"):
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        pages.add(done.stdout[done.stdout.index("<!") : done.stdout.index("</html>")])
    assert len(pages) == 1


def test_a_name_that_nobody_had_time_to_say_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record(brand="unknown").to_json()))
    monkeypatch.setattr(sources, "brand", lambda: "PDP-11/70")
    assert sources.source(path).record.brand == "PDP-11/70"
    elsewhere = record(brand="unknown", box={**cpu.this_box().to_json(), "arch": "pdp11"})
    path.write_text(json.dumps(elsewhere.to_json()))
    assert sources.source(path).record.brand == "unknown"


@pytest.mark.parametrize("time", [5e-324, 1e-320, 1e308, -1.0, 0.0])
def test_times_that_no_clock_gave_are_left_out(time: float) -> None:
    centres = {"fast": 1e-3, "base": 2e-3, "near": time}
    text = page.render([source(kernels={"q8q8": kernel(regimes={"main": regime(centres=centres)})})], "1", [])
    assert "fast" in text
