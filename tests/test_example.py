# SPDX-License-Identifier: Apache-2.0
"""The worked example: its transcript in the docs, the container recipe with an empty home, and the page for operators."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from tunekit import _manifest, _status, dispatch

APP = ROOT / "examples" / "tuned_app" / "app.py"


@pytest.mark.build
@pytest.mark.slow
def test_the_transcript_in_the_docs_is_what_the_example_prints() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs" / "transcript.py", "--check"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def container(folder: Path, home: str) -> dict[str, str]:
    """The recipe's variables, its volume in a folder, and a home with nothing in it."""
    (recipe,) = re.findall(r"```dockerfile\n(.*?)```", (ROOT / "docs" / "policy.md").read_text(encoding="utf-8"), re.S)
    (line,) = re.findall(r"^ENV (.*)$", recipe, re.M)
    variables = dict(word.split("=") for word in line.split())
    assert set(variables) == {"TUNEKIT_HOME", "TUNEKIT_CACHE"}
    assert "VOLUME /state" in recipe
    (folder / home).mkdir()
    own = {k: v for k, v in os.environ.items() if not k.startswith(("TUNEKIT_", "PYTHON", "XDG_"))}
    moved = {name: value.replace("/state", str(folder / "volume"), 1) for name, value in variables.items()}
    return {**own, "HOME": str(folder / home), "PYTHONDONTWRITEBYTECODE": "1", **moved}


@pytest.mark.build
@pytest.mark.slow
def test_containers_tune_once_for_a_volume(tmp_path: Path) -> None:
    def begin(home: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, APP], env=container(tmp_path, home), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    both = [begin("first"), begin("second")]  # at once, on an empty volume
    third: list[subprocess.Popen[str]] = []
    outputs = [process.communicate(timeout=200) for process in both]
    third.append(begin("third"))
    outputs.append(third[0].communicate(timeout=100))
    for out, err in outputs:
        assert "app: walk.column_sums: walk_rows (manifest)" in out, err
    assert sum("walk_rows wins" in err for _, err in outputs) == 1
    assert outputs[2][1] == ""
    assert not [p for home in ("first", "second", "third") for p in (tmp_path / home).rglob("*")]  # all state is on the volume


# --- "am I tuned?" ---------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "am-i-tuned.md").read_text(encoding="utf-8")


def test_the_page_is_one_page_and_its_rows_are_what_the_status_says(
    toy: Any, environ: Callable[..., None], tmp_path: Path
) -> None:
    assert len(PAGE.splitlines()) < 66
    cache = os.environ["TUNEKIT_CACHE"]
    path = _manifest.user_path("toyscope")
    path.parent.mkdir(parents=True)

    def answer(manifest: str | None, **variables: str | None) -> tuple[str, str, str]:
        path.unlink(missing_ok=True)
        if manifest is not None:
            path.write_text(manifest)
        environ(**{"CACHE": cache, "PIN": None, "POLICY": None, **variables})
        row = _status.status_of(toy.toy.kernel)
        return row.source, row.tier, row.reason

    rows = re.findall(r"^\| `(\w+)`(.*?) \|", PAGE, re.M)
    assert {source for source, _ in rows} == {"manifest", "fallback", "pin", "reference"}
    assert answer('{"toy": "k2"}')[0] == "manifest"
    assert answer(None, PIN="toy=k2")[0] == "pin"
    assert answer(None, POLICY="reference")[:2] == ("reference", "c")
    assert answer(None, CACHE=str(tmp_path / "none"))[:2] == ("reference", "python")
    wanted = [words for source, words in rows if source == "fallback"]
    texts = [None, "{}", "{", '{"toy": "k2"}']
    for words, text in zip(wanted[:4], texts, strict=True):
        (quoted,) = re.findall(r'"(.*?)"', words)
        if quoted.startswith("not built"):  # with the fat module alone
            dispatch._modules.clear()
            dispatch._modules["toyscope:toy.kernels:True"] = dispatch.loaded_modules(toy.toy.kernel)
            path.write_text('{"toy": "k2"}')
            found = _status.status_of(toy.toy.kernel)
            source, reason = found.source, found.reason
        else:
            source, _, reason = answer(text)
        assert (source, quoted in reason) == ("fallback", True), (quoted, reason)


def test_the_line_of_each_choice_is_the_one_on_the_page(toy: Any) -> None:
    (form,) = re.findall(r"```text\n(tunekit: .*)\n```", PAGE)
    choice = toy.toy.choice()
    line = form.replace("SCOPE.KERNEL", choice.kernel).replace("ROW", choice.suffix)
    line = line.replace("SOURCE", choice.source).replace("TIER", choice.tier).replace("REASON", choice.reason)
    assert choice.log_line() == line


def test_log_status_names_the_way_that_the_application_has(tmp_path: Path) -> None:
    code = (
        "import logging, sys, tunekit as tk; sys.path.insert(0, sys.argv[1]); import alpha\n"
        "tk.policy(missing='fallback').apply()\n"
        "logging.basicConfig(level='INFO', format='%(message)s', stream=sys.stdout)\n"
        "tk.log_status('app')"
    )
    done = subprocess.run([sys.executable, "-c", code, ROOT / "tests" / "rail"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[-1] == "app: to tune this box: start it again with: -- --tune"
    assert json.dumps(done.stdout).count("0/1 kernels tuned") == 1
