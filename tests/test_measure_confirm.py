# SPDX-License-Identifier: Apache-2.0
"""Confirming: what pairs say, what an arm must prove, and what becomes of a winner of races that loses its application."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import processes, run_python
from measure_fakes import FakeFixtures, FakeHouse, FakeRow, SimulatedBox
from test_measure_tuner import REGIMES, ROWS, command, run, times, toy

from tunekit import retune
from tunekit.kernel import Companion
from tunekit.measure import arm, confirm
from tunekit.measure.confirm import CONFIRMED, OPEN, REJECTED, UNFINISHED, UNUSABLE, Arm, ArmFailed
from tunekit.measure.fixtures import Chain, Part
from tunekit.measure.gate import Job
from tunekit.measure.race import Deadline
from tunekit.measure.record import RunRecord
from tunekit.rows import perm

APP = Chain("app", (Part("a", 1.0), Part("b", 1.0)), lambda: lambda part: None)


# --- what pairs say --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "more", "state"),
    [
        ([1.10], True, OPEN),
        ([1.10, 1.11, 1.10, 1.12], True, OPEN),  # four crown nobody
        ([1.10, 1.11, 1.10, 1.12, 1.10], True, CONFIRMED),
        ([0.9, 1.0, 1.019], True, REJECTED),  # three send away
        ([0.9, 1.0], True, OPEN),
        ([1.0, 1.05, 1.0, 1.0], True, OPEN),
        ([1.019] * 5, False, REJECTED),  # 2 % is not reached
        ([1.021] * 5, False, CONFIRMED),
        ([1.2, 0.8, 1.3, 0.9, 1.25, 0.85, 1.2, 0.9], False, REJECTED),  # a lead within its own noise is none
    ],
)
def test_judging(ratios: Sequence[float], more: bool, state: str) -> None:
    assert confirm.judge(ratios, more).state == state


def outcome(gain: float, noise: float, seed: int) -> str:
    """A challenger that is really faster by a factor, on a noisy box."""
    rng = random.Random(seed)

    def act(who: Arm, chain: Chain) -> Mapping[str, Sequence[float]]:
        base = 1.0 if who.row == "old" else 1 / gain
        return {part.name: [base * rng.lognormvariate(0, noise) for _ in range(2)] for part in chain.parts}

    return confirm.confirm(Arm("new"), Arm("old"), "*", [APP], act)[0].verdict


@pytest.mark.parametrize(
    ("gain", "noise", "least", "most"),
    [(1.0, 0.005, 0, 0), (1.0, 0.03, 0, 8), (1.01, 0.01, 0, 5), (1.05, 0.01, 95, 100), (1.1, 0.03, 90, 100), (0.9, 0.1, 0, 2)],
)
def test_how_often_a_challenger_is_confirmed(gain: float, noise: float, least: int, most: int) -> None:
    found = [outcome(gain, noise, seed) for seed in range(100)].count(CONFIRMED)
    assert least <= found <= most


def test_arms_take_turns_and_drift_meets_both_alike() -> None:
    order: list[str] = []
    clock = itertools.count()

    def act(who: Arm, chain: Chain) -> Mapping[str, Sequence[float]]:
        order.append(who.row)
        pace = 1 + 0.2 * next(clock)  # it slows down by a fifth from arm to arm
        return {part.name: [pace] for part in chain.parts}

    [record] = confirm.confirm(Arm("new"), Arm("old"), "*", [APP], act)
    assert order[:6] == ["old", "new", "new", "old", "old", "new"]
    assert record.verdict == REJECTED and len(record.ratios) == len(order) / 2


def test_scores_count_the_parts_in_question_and_the_best_pass() -> None:
    chain = Chain("c", (Part("p", 1.0), Part("d", 1.0, ("*", "g")), Part("s", 1.0, ("g",))), lambda: lambda part: None)
    got = {"p": [3.0, 2.0], "d": [0.5, 0.6], "s": [9.0, 8.0]}
    assert confirm.score(got, chain, "*") == 2.5 and confirm.score(got, chain, "g") == 8.5
    assert confirm.decides(chain, "g") and not confirm.decides(APP, "g")
    with pytest.raises(ArmFailed, match="no times of s"):
        confirm.score({"p": [1.0], "d": [1.0], "s": []}, chain, "g")


def test_every_chain_must_be_won_and_the_first_lost_one_ends_it() -> None:
    chains = [Chain(name, APP.parts, APP.prepare) for name in ("one", "two", "three")]

    def act(who: Arm, chain: Chain) -> Mapping[str, Sequence[float]]:
        fast = who.row == "new" and chain.name == "one"
        return {part.name: [0.5 if fast else 1.0] for part in chain.parts}

    records = confirm.confirm(Arm("new"), Arm("old"), "*", chains, act)
    assert [(r.chain, r.verdict) for r in records] == [("one", CONFIRMED), ("two", REJECTED)]
    assert not confirm.confirmed(records) and confirm.confirmed(records[:1]) and not confirm.confirmed([])
    assert records[0].ratio == 2.0 and records[0].parts == {"a": 2.0, "b": 2.0}
    assert records[0].samples["base"]["a"] == [1.0] * 5


@pytest.mark.parametrize(("broken", "verdict"), [("new", REJECTED), ("old", UNUSABLE)])
def test_an_arm_that_scores_nothing_is_asked_once_more(broken: str, verdict: str) -> None:
    fails = {"new": 0, "old": 0}

    def act(who: Arm, chain: Chain) -> Mapping[str, Sequence[float]]:
        if who.row == broken:
            fails[broken] += 1
            raise ArmFailed("killed by SIGKILL")
        return {part.name: [1.0] for part in chain.parts}

    [record] = confirm.confirm(Arm("new"), Arm("old"), "*", [APP], act)
    assert (record.verdict, record.ratio, fails[broken]) == (verdict, None, 2)
    assert "scored nothing" in record.reason and "SIGKILL" in record.reason
    assert not confirm.confirmed([record])


def test_a_chain_that_cannot_be_run_says_nothing_and_another_may() -> None:
    chains = [Chain("torn", APP.parts, APP.prepare), APP]

    def act(who: Arm, chain: Chain) -> Mapping[str, Sequence[float]]:
        if chain.name == "torn":
            raise ArmFailed("it could not begin: MemoryError")
        return {part.name: [0.5 if who.row == "new" else 1.0] for part in chain.parts}

    records = confirm.confirm(Arm("new"), Arm("old"), "*", chains, act)
    assert [r.verdict for r in records] == [UNUSABLE, CONFIRMED] and confirm.confirmed(records)


def test_the_time_limit_leaves_it_unfinished() -> None:
    box = SimulatedBox()

    def act(who: Arm, chain: Chain) -> Mapping[str, Sequence[float]]:
        box.now += 10
        return {part.name: [1.0] for part in chain.parts}

    [record] = confirm.confirm(Arm("new"), Arm("old"), "*", [APP], act, Deadline(35, box.clock))
    assert record.verdict == UNFINISHED and len(record.ratios) == 2 and not confirm.confirmed([record])


def test_a_box_too_busy_for_pairs_crowns_nobody_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirm, "BUDGET", 0.0)
    [record] = confirm.confirm(Arm("new"), Arm("old"), "*", [APP], lambda who, chain: {"a": [1.0], "b": [1.0 + (who.row == "old")]})
    assert record.verdict == REJECTED and record.ratio == 1.5
    assert record.reason.endswith("only 1 pairs in 0 s, and 5 are wanted: retune when the box is quiet")
    assert not confirm.settled(record)  # a later run asks again


@pytest.mark.parametrize(
    ("verdict", "ratios", "margin", "known"),
    [
        (CONFIRMED, [1.2] * 5, 0.05, True),
        (REJECTED, [0.9, 1.0, 1.01], 0.3, True),  # never ahead
        (REJECTED, [1.0, 1.03, 1.01, 1.0, 1.02], 0.02, True),
        (REJECTED, [1.0, 1.3, 1.01, 1.0, 1.02], 0.2, False),  # noise
        (REJECTED, [], None, False),
        (UNFINISHED, [1.2] * 5, 0.02, False),
        (UNUSABLE, [], None, False),
    ],
)
def test_what_a_later_run_need_not_ask_again(verdict: str, ratios: list[float], margin: float | None, known: bool) -> None:
    record = confirm.ConfirmRecord("app", "*", "b", "a", verdict, "", 1.0 if ratios else None, margin, ratios)
    assert confirm.settled(record) is known


# --- what an arm must prove ------------------------------------------------------------------------------


def ask(*words: str, want: Arm = Arm("fast"), seconds: float = 20.0) -> Mapping[str, Sequence[float]]:  # noqa: B008
    job = Job("measure_arms:load", words)
    return arm.run_arm(job, want, {"s.k": want.row}, APP, Deadline(None), seconds=seconds)


def test_an_arm_that_ran_what_it_should_is_believed() -> None:
    got = ask("works", "fast")
    assert set(got) == {"a", "b"} and len(got["a"]) == arm.PASSES and min(got["a"]) >= 0.001
    assert ask("works", "fast", "c", "other", want=Arm("fast", {"g": "other"}))
    assert max(ask("often", "fast")["a"]) < 0.001  # a thousand times two microseconds


def test_a_copy_of_an_arm_that_a_kernel_forks_says_nothing() -> None:
    assert min(min(times) for times in ask("copies", "fast").values()) >= 0.001


# fmt: off
@pytest.mark.parametrize(("words", "reason"), [
    (("dies", "fast"),                   "killed by SIGABRT"),
    (("leaves", "fast"),                 "exit status 0 before the verdict"),
    (("hangs", "fast"),                  "no answer in"),
    (("forges", "fast"),                 "wrote into the channel"),
    (("cannot load", "fast"),            "it could not begin: RuntimeError: no such luck"),
    (("no memory", "fast"),              "it could not begin: MemoryError: weights"),
    (("works", "none"),                  "it never ran the kernel"),
    (("works", "nonsense"),              "it never ran the kernel"),
    (("talks", "slow"),                  r"it ran slow \(c\), not fast"),
    (("works", "fast", "python"),        r"it ran fast \(python\), not fast"),
    (("works", "fast", "c", "other"),    r"it ran fast g=other \(c\), not fast"),
])
def test_an_arm_that_dies_says_nothing_or_ran_something_else_scores_nothing(words: Any, reason: str) -> None:
    with pytest.raises(ArmFailed, match=reason):
        ask(*words, seconds=3.0 if words[0] == "hangs" else 20.0)
# fmt: on


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"times": {"a": [1.0]}}, "other parts"),
        ({"times": {"a": [1.0], "b": [1.0], "c": [1.0]}}, "other parts"),
        ({"times": {"a": [1.0], "b": []}}, "its times of b"),
        ({"times": {"a": [1.0], "b": [0.0]}}, "its times of b"),
        ({"times": {"a": [float("nan")], "b": [1.0]}}, "its times of a"),
        ({"times": {"a": "fast", "b": [1.0]}}, "its times of a"),
        ({}, "other parts"),
    ],
)
def test_times_that_are_none_are_not_believed(answer: dict[str, Any], reason: str) -> None:
    proof = {"row": "fast", "tier": "c", "seats": {}}
    with pytest.raises(ArmFailed, match=reason):
        arm._believe({**answer, "ran": proof}, Arm("fast"), APP)


def test_an_arm_of_a_real_family_runs_the_row_that_is_pinned(toy_cache: Path, tmp_path: Path) -> None:
    """Both ways: the toy family's own regimes as its chain, and a pin that cannot be had is found out."""
    code = (
        "import toy.kernels as t\nfrom tunekit import tuner\nfrom tunekit.measure import confirm, family\n"
        "from tunekit.measure.race import Deadline\n"
        "k = t.toy.kernel\nhouse = tuner.House()\n"
        "[chain] = house.chains(k, family.fixtures_of(k), None)\nprint(chain.name, [p.name for p in chain.parts])\n"
        "for arm in (confirm.Arm('k1'), confirm.Arm('k2'), confirm.Arm('k1', {'toy_k': 'k2'}), confirm.Arm('k3')):\n"
        "    try:\n        print(arm.label, sorted(house.arm(k, arm, chain, None, Deadline(None))))\n"
        "    except confirm.ArmFailed as error:\n        print(arm.label, error)\n"
    )
    done = run_python(code, {"TUNEKIT_CACHE": str(toy_cache), "TUNEKIT_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    first, *arms = done.stdout.splitlines()
    assert first.startswith("its own regimes [")
    assert [line.split("[")[0].strip() for line in arms[:3]] == ["k1", "k2", "k1 toy_k=k2"]
    assert "k3 it ran k1 (c), not k3" in arms[3]


# --- in a run --------------------------------------------------------------------------------------------


def test_a_winner_of_races_that_loses_its_application_is_not_crowned() -> None:
    """The planted row: a quarter faster in the races, and 2 % slower where it is used."""
    box = SimulatedBox(1, noise=0.005)
    house = toy(box)
    house.chain_times = {("k2_g2", "*"): 1.02e-3, ("k1", "*"): 1e-3}
    status, kernel, result = run(house, box)
    assert status == 0 and house.manifest == {"gemm": "k1"}
    assert kernel.winner == "k1" and kernel.picks == {"tile": "k2", "gemv": "k2_g2"}
    assert kernel.rows["k2_g2"].verdict == "unconfirmed" and "app: -2.0 % over k1" in kernel.rows["k2_g2"].reason
    assert kernel.rows["k1"].verdict == "winner" and "was not confirmed" in kernel.reason
    [entry] = kernel.confirm
    assert (entry.verdict, entry.challenger, entry.base) == ("rejected", "k2_g2", "k1")
    assert entry.ratio == pytest.approx(1 / 1.02) and len(entry.ratios) == 3
    assert RunRecord.from_json(house.last).kernels["gemm"] == kernel
    assert any("k1 is kept" in note for note in kernel.notes)
    assert retune.change("gemm", kernel) == "gemm: unchanged, fallback k1 (now explicit)"
    assert any(name == "confirm" for name in result.record.stages)


def test_a_winner_that_wins_there_too_is_crowned_with_its_ratio() -> None:
    box = SimulatedBox(1, noise=0.005)
    house = toy(box)
    _, kernel, _ = run(house, box)
    assert house.manifest == {"gemm": "k2_g2"} and kernel.confirm[0].verdict == "confirmed"
    assert kernel.confirm[0].ratio == pytest.approx(1.25)
    assert house.arms[:4] == ["k1", "k2_g2", "k2_g2", "k1"]
    box = SimulatedBox(1, noise=0.005)
    _, out, _ = command(toy(box), box=box)
    assert "confirm on app: k2_g2 confirmed: +25.0 % over k1" in out


def test_where_the_fallback_wins_nothing_is_confirmed() -> None:
    box = SimulatedBox(3, noise=0.005)
    house = toy(box, {"k2": None, "k2_g2": None})
    _, kernel, _ = run(house, box)
    assert kernel.winner == "k1" and kernel.confirm == [] and house.arms == []


def test_a_challenger_whose_arm_dies_is_not_crowned() -> None:
    box = SimulatedBox(1, noise=0.005)
    house = toy(box)
    house.chain_times = {("k2_g2", "*"): -1.0}
    _, kernel, _ = run(house, box)
    assert house.manifest == {"gemm": "k1"} and "scored nothing: exit status 0" in kernel.rows["k2_g2"].reason


def test_nothing_to_confirm_with_keeps_the_fallback_and_says_so() -> None:
    box = SimulatedBox(1, noise=0.005)
    house = toy(box)
    house.chained = []
    _, kernel, _ = run(house, box)
    assert house.manifest == {"gemm": "k1"} and "nothing to confirm it with" in kernel.reason

    class Unreadable(FakeHouse):
        def chains(self, kernel: Any, fixtures: Any, model: str | None) -> Any:
            raise ValueError(f"{model} is no model")

    other = Unreadable()
    other.add("gemm", ROWS, "k1", [FakeRow("k1", times(1e-3)), FakeRow("k2", times(0.8e-3))], FakeFixtures(box, REGIMES))
    _, kernel, _ = run(other, box, model="x.gguf")
    assert other.manifest == {"gemm": "k1"} and kernel.confirm[0].reason == "x.gguf is no model"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Breaks(FakeHouse):
    """A family whose confirm() raises."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def chains(self, kernel: Any, fixtures: Any, model: str | None) -> Any:
        raise self.error


@pytest.mark.parametrize("incumbent", [None, "k2"])
@pytest.mark.parametrize("confirm_row", [None, "k2"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("on purpose\nand more"), "RuntimeError: on purpose and more"),
        (SystemExit(0), "SystemExit: 0"),
        (Mute(), "Mute"),
        (AttributeError(), "AttributeError"),
    ],
)
def test_a_confirm_that_raises_is_one_line_and_what_ran_before_stays(
    error: BaseException, words: str, incumbent: str | None, confirm_row: str | None
) -> None:
    box = SimulatedBox(1, noise=0.005)
    house = Breaks(error)
    house.add("gemm", ROWS, "k1", [FakeRow("k1", times(1e-3)), FakeRow("k2", times(0.8e-3))], FakeFixtures(box, REGIMES))
    house.manifest = {"gemm": incumbent} if incumbent else {}
    status, kernel, _ = run(house, box, confirm=confirm_row)
    assert status == 0 and kernel.winner == (incumbent or "k1")
    [entry] = kernel.confirm
    assert entry.verdict == "unusable" and entry.reason == words
    if incumbent is None:
        assert kernel.rows["k2"].verdict == "unconfirmed" and words in kernel.reason
    if confirm_row is None:
        assert house.manifest == {"gemm": incumbent or "k1"}


@pytest.mark.parametrize("answer", [None, 42, [42], "chain", [Chain("c", (), lambda: lambda part: None)], [APP, APP]])
def test_what_confirm_returns_is_looked_at(answer: Any) -> None:
    from tunekit.errors import GateError
    from tunekit.measure.family import chains_of

    class Odd(FakeFixtures):
        def confirm(self, model: str | None) -> Any:
            return answer

    box = SimulatedBox(1)
    [kernel] = toy(box).declared
    with pytest.raises(GateError, match="confirm"):
        chains_of(kernel, Odd(box, REGIMES), None)


@pytest.mark.parametrize("incumbent", [None, "k2_g2"])
def test_a_time_limit_during_the_confirmation_keeps_what_ran_before(incumbent: str | None) -> None:
    box = SimulatedBox(1, noise=0.005)

    class Slow(FakeHouse):
        def arm(self, *words: Any) -> Any:
            box.now += 1000
            return super().arm(*words)

    house = Slow()
    bound = [FakeRow("k1", times(1e-3)), FakeRow("k2", times(0.8e-3)), FakeRow("k2_g2", times(0.8e-3, 0.83e-4))]
    house.add("gemm", ROWS, "k1", bound, FakeFixtures(box, REGIMES))
    if incumbent:
        house.manifest["gemm"] = incumbent
    status, kernel, _ = run(house, box, time_limit=500.0)
    assert status == 0 and house.manifest == {"gemm": incumbent or "k1"} and not kernel.complete
    assert [entry.verdict for entry in kernel.confirm] == ["unfinished"]


def test_one_row_is_confirmed_by_hand_and_nothing_is_written() -> None:
    box = SimulatedBox(1, noise=0.005)
    house = toy(box)
    status, kernel, _ = run(house, box, confirm="k4")
    assert status == 0 and house.manifest == {} and "write" not in house.events
    assert kernel.regimes == {} and kernel.rows["k4"].verdict == "unconfirmed"
    assert kernel.confirm[0].ratio == pytest.approx(1 / 0.99)
    assert run(house, box, confirm="k2")[1].winner == "k2"
    assert house.manifest == {}


@pytest.mark.parametrize(("row", "why"), [("k8", "this CPU lacks avx512f"), ("k99", "the grid has no such row")])
def test_a_row_that_cannot_run_here_is_refused_before_anything_is_built(row: str, why: str) -> None:
    box = SimulatedBox(1, noise=0.005)
    house = toy(box)
    status, out, err = command(house, "--confirm", row, box=box)
    assert (status, out, err) == (2, "", f"tunekit: --confirm {row}: {why}\n") and house.events == []


def test_a_model_is_looked_at_before_anything_is_built() -> None:
    box = SimulatedBox(1, noise=0.005)
    house = toy(box)
    assert command(house, "--model", "some.gguf", box=box)[0] == 0
    assert house.events[:2] == ["read some.gguf", "build"]


@pytest.mark.parametrize("option", ["--confirm", "--kernel", "--scope", "--model", "--module"])
@pytest.mark.parametrize("word", ["", "  "])
def test_an_option_that_is_given_empty_is_an_error(option: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        retune.main([option, word])
    assert ended.value.code == 2 and f"{option[2:]}: it is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["status", "--scope", ""],
        ["build", "--module", ""],
        ["verify", "--kernel", "", "--emission"],
        ["verify", "--row", ""],
        ["report", "--output", ""],
        ["show", "", "k1"],
        ["manifest", "show", "--scope", ""],
    ],
)
def test_other_commands_refuse_empty_words_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from tunekit.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and "it is empty" in capsys.readouterr().err


# --- seats -----------------------------------------------------------------------------------------------


class SeatFixtures(FakeFixtures):
    def regimes(self) -> Any:
        import dataclasses

        return [dataclasses.replace(r, seat="vec") if r.name == "gemv" else r for r in super().regimes()]


def seated(box: SimulatedBox, other: str = "narrow") -> FakeHouse:
    """k1 is best at the tile by far; k5, which reads the same data, is better at GEMV by 30 %; k6 reads ``other``."""
    house = FakeHouse()
    bound = [
        FakeRow("k1", times(1e-3, 1e-4)),
        FakeRow("k5", times(2e-3, 0.7e-4)),
        FakeRow("k6", times(2e-3, 0.5e-4)),
    ]
    rows = [perm(k=1), perm(k=5), perm(k=6)]
    kernel = house.add("gemm", rows, "k1", bound, SeatFixtures(box, {"tile": "*", "gemv": ()}))
    object.__setattr__(kernel, "companions", (Companion("vec", None, "vec"),))  # type: ignore[arg-type]
    object.__setattr__(kernel, "layout", lambda row: other if row and row["k"] == 6 else "narrow")
    house.chained = [Chain("app", (Part("prefill", 1.0), Part("decode", 1.0, ("*", "vec"))), lambda: lambda part: None)]
    house.chain_times = {("k1", "*"): 1.0, ("k5", "decode"): 0.7, ("k6", "decode"): 0.5, ("k5", "prefill"): 2.0}
    return house


def test_a_seat_goes_to_the_best_row_of_the_same_layout() -> None:
    box = SimulatedBox(5, noise=0.005)
    house = seated(box, "wide")
    _, kernel, _ = run(house, box)
    assert (kernel.winner, kernel.seats) == ("k1", {"vec": "k5"}) and house.seated == {"gemm": {"vec": "k5"}}
    [entry] = kernel.confirm
    assert (entry.what, entry.challenger, entry.base, entry.verdict) == ("vec", "k1 vec=k5", "k1", "confirmed")
    assert set(kernel.regimes["gemv"].finalists) == {"k1", "k5"} and kernel.regimes["gemv"].seat == "vec"
    assert ", vec: k5" in retune.change("gemm", kernel)
    house = seated(box, "narrow")
    assert run(house, box)[1].seats == {"vec": "k6"}


def test_a_seat_that_is_not_confirmed_follows_the_kernel() -> None:
    box = SimulatedBox(5, noise=0.005)
    house = seated(box, "wide")
    house.chain_times["k5", "decode"] = 1.0
    _, kernel, _ = run(house, box)
    assert (kernel.winner, kernel.seats, house.seated) == ("k1", {}, {"gemm": {}})
    assert kernel.confirm[0].verdict == "rejected"


def test_a_tie_keeps_the_seat_that_ran_before_and_else_the_kernels_row() -> None:
    box = SimulatedBox(5, noise=0.005)
    house = seated(box)
    house.rows["gemm"] = {**house.rows["gemm"], "k5": FakeRow("k5", times(2e-3, 0.51e-4))}
    house.manifest, house.seated = {"gemm": "k1"}, {"gemm": {"vec": "k5"}}
    assert run(house, box)[1].seats == {"vec": "k5"}
    tied = seated(box)
    tied.rows["gemm"] = {name: FakeRow(name, {**row.times, "gemv": 1e-4}) for name, row in tied.rows["gemm"].items()}
    assert run(tied, box)[1].seats == {}


def test_a_pair_is_checked_together_before_it_is_confirmed(q8_cache: Path, tmp_path: Path) -> None:
    code = (
        "from tunekit import tuner, dispatch\nfrom tunekit.measure import gate, family\nfrom tunekit.q8 import kernels\n"
        "import dataclasses\nk = kernels.q8q8.kernel\nrows = [s for s in dispatch.grid_rows(k) if s != 'reference']\n"
        "a, b = next((a, b) for a in rows for b in rows if a != b and k.same_layout(a, b))\n"
        "name = family.pair_name(a, {'q8q8_gemv': b})\njob = tuner.House().job(k)\n"
        "job = dataclasses.replace(job, args=(*job.args, name))\n"
        "print(gate.gate_rows(job, [name])[name].state)"
    )
    done = run_python(code, {"TUNEKIT_CACHE": str(q8_cache), "TUNEKIT_HOME": str(tmp_path)}, timeout=300)
    assert done.stdout.split() == ["passed"], done.stderr


def test_no_process_is_left_when_an_arm_is_stopped() -> None:
    start = time.monotonic()
    with pytest.raises(ArmFailed, match="time limit"):
        arm.run_arm(Job("measure_arms:load", ("hangs", "fast")), Arm("fast"), {}, APP, Deadline(2.0))
    assert time.monotonic() - start < 10
    assert not processes("measure_arms")
