# SPDX-License-Identifier: Apache-2.0
"""Faults that a stranger found, each once more with the right answer."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from conftest import ROOT, TOY_ENVIRONMENT, run_python
from tunekit.build_tools import build_cached

import tunekit as tk
from tunekit import _manifest, dispatch, paths
from tunekit.kernel import Kernel
from tunekit.signature import check_call, signature_of


def test_no_home_and_no_passwd_entry_is_a_private_temporary_folder(
    environ: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import platformdirs

    def raises(name: str) -> str:
        raise RuntimeError("could not determine the home directory")

    environ(HOME=None, CACHE=None)
    for broken in (raises, lambda name: "~/.local/state"):
        monkeypatch.setattr(platformdirs, "user_state_dir", broken)
        monkeypatch.setattr(platformdirs, "user_cache_dir", broken)
        assert paths.state_root().is_absolute()
        assert paths.state_root().name == "state"
        assert paths.cache_root().parent.name == f"tunekit-{os.getuid()}"


def test_a_folder_that_may_not_be_searched_is_a_reason_and_no_traceback(
    toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = _manifest.user_path("toyscope")
    real_exists, real_stat = Path.exists, Path.stat

    def exists(self: Path, **options: Any) -> bool:
        if str(self).startswith(str(own.parent)):
            raise PermissionError(13, "Permission denied")
        return real_exists(self, **options)

    def stat(self: Path, **options: Any) -> os.stat_result:
        if str(self).startswith(str(own.parent)):
            raise PermissionError(13, "Permission denied")
        return real_stat(self, **options)

    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr(Path, "stat", stat)
    choice = toy.toy.choice()
    assert (choice.suffix, choice.source) == ("k1", "fallback")
    assert "it cannot be read (Permission denied)" in choice.reason


def test_a_pipe_in_the_manifests_place_does_not_hang(toy: Any, environ: Callable[..., None], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    environ(MANIFEST=str(tmp_path / "pipe"), CACHE=os.environ["TUNEKIT_CACHE"])
    assert "not a regular file" in toy.toy.choice().reason


@pytest.fixture
def kernel() -> Kernel:
    import toy.kernels

    found: Kernel = toy.kernels.toy.kernel
    return found


@pytest.mark.build
@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:700], lambda b: b"\0" * 64 + b[64:]])
def test_damaged_objects_and_modules_are_made_again(kernel: Kernel, damage: Callable[[bytes], bytes]) -> None:
    first = build_cached([kernel], "fat")
    assert first.path is not None
    for path in [first.path, *paths.objects_folder().glob("*.o")]:
        content = damage(path.read_bytes())
        path.unlink()
        path.write_bytes(content)
    again = build_cached([kernel], "fat")
    assert again.path == first.path
    done = run_python("import toy.kernels as t; print(t.toy(2, 3), t.toy.choice().tier)")
    assert done.stdout.split() == ["6", "c"], done.stderr


@pytest.mark.build
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            "//% if k == 2\nint32_t nowhere(int32_t);\nint32_t (*tk_taken__k2)(int32_t) = nowhere;\n//% endif\n",
            "nowhere",
        ),
        ("//% if k == 2\n#define tk_toyscope_toy_k__k2 another\n//% endif\n", "tk_toyscope_toy_k__k2"),
    ],
    ids=["undefined symbol", "function missing"],
)
def test_a_row_that_would_not_link_is_dropped_alone(kernel: Kernel, tmp_path: Path, extra: str, words: str) -> None:
    text = (ROOT / "tests/toy/toy.c.j2").read_text()
    text = text + extra if "taken" in extra else extra + text
    (tmp_path / "own.c.j2").write_text(text)
    own = dataclasses.replace(kernel, template="own.c.j2", reference="own.c.j2", file=str(tmp_path / "kernels.py"))
    report = build_cached([own], "grid")
    assert report.built[own.key] == ["reference", "k1", "k3", "k4"]
    assert words in report.dropped[own.key]["k2"]


@pytest.mark.build
def test_the_stamp_does_not_depend_on_what_the_process_did_before(kernel: Kernel) -> None:
    from tunekit.build_tools import row_source

    first = build_cached([kernel], "stamped", {kernel.key: ["k2"]})
    build_cached([kernel], "grid")
    row_source(kernel, "k1", "x86_64")
    assert build_cached([kernel], "stamped", {kernel.key: ["k2"]}).path == first.path


def test_a_changed_template_is_said(
    toy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tunekit import _templates
    from tunekit.__main__ import main

    monkeypatch.setattr(dispatch, "installed_scopes", lambda: {"toyscope": "toy.kernels"})
    main(["status"])
    assert "has changed" not in capsys.readouterr().out
    monkeypatch.setattr(_templates, "read_template", lambda name, folder: "another text")
    main(["status"])
    assert "note: template toy/toy.c.j2 has changed since _tk_toyscope_" in capsys.readouterr().out


def test_a_pin_that_names_no_kernel_is_said(
    toy: Any, environ: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tunekit.__main__ import main

    monkeypatch.setattr(dispatch, "installed_scopes", lambda: {"toyscope": "toy.kernels"})
    environ(PIN="nokernel=reference", CACHE=os.environ["TUNEKIT_CACHE"])
    main(["status"])
    assert "TUNEKIT_PIN names 'nokernel', which is no kernel here" in capsys.readouterr().out


def test_disabling_what_is_no_feature_is_said(toy: Any, environ: Callable[..., None]) -> None:
    environ(DISABLE_FEATURES="avx-2", CACHE=os.environ["TUNEKIT_CACHE"])
    with pytest.warns(tk.TunekitWarning, match=r"names 'avx-2', which is no feature.*it disables nothing"):
        toy.toy(1, 2)
    environ(DISABLE_FEATURES="nonsense", STRICT="features", CACHE=os.environ["TUNEKIT_CACHE"])
    with pytest.raises(tk.SettingError, match="nonsense|no-such-feature"):
        toy.toy(1, 2)


@pytest.mark.parametrize("words", [["environment"], ["list", "--json"], ["status"]])
@pytest.mark.parametrize(("redirect", "status"), [(">&-", 0), ("> /dev/full", 1)])
def test_no_traceback_where_nobody_can_read(words: list[str], redirect: str, status: int) -> None:
    environment = {**os.environ, **TOY_ENVIRONMENT}
    done = subprocess.run(
        f"{sys.executable} -m tunekit {' '.join(words)} {redirect}", shell=True, executable="/bin/bash",
        capture_output=True, text=True, cwd=ROOT / "tests", env=environment, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.returncode == status
    assert ("cannot be written" in done.stderr) == (status == 1)


def test_assembly_of_another_architecture_is_refused(
    toy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tunekit import cpu
    from tunekit.__main__ import main

    monkeypatch.setattr(dispatch, "installed_scopes", lambda: {"toyscope": "toy.kernels"})
    other = "aarch64" if cpu.this_cpu().arch == "x86_64" else "x86_64"
    assert main(["show", "toy", "k1", "--assembly", "--arch", other]) == 2
    assert "name a cross compiler in CC" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["register", "double", "tk_function", "é"])
def test_parameters_that_c_cannot_spell(name: str) -> None:
    space: dict[str, Any] = {"tk": tk}
    exec(f"def f({name}: tk.i32) -> None: ...", space)
    with pytest.raises(tk.DeclarationError, match=r"cannot be a C parameter .*rename it"):
        signature_of(space["f"], "kernel 'f'")


def test_a_size_that_divides_by_zero_and_a_number_beyond_float() -> None:
    def f(y: Annotated[tk.Out[tk.f32], "8 // n"], n: tk.i32, a: tk.f32) -> None:
        del y, n, a

    signature = signature_of(f, "kernel 'f'")
    y = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="divides by zero"):
        check_call("f", signature, [y, 0, 1.0])
    with pytest.raises(ValueError, match="a is too large for f32"):
        check_call("f", signature, [y, 1, 10**400])


def test_calls_by_name_and_pickling_by_name(toy: Any) -> None:
    assert toy.toy(b=3, a=2) == toy.toy(2, b=3) == 6
    for arguments, named, words in (
        ((2,), {}, r"takes 2 arguments"),
        ((2,), {"c": 1}, "no parameter 'c'"),
        ((2,), {"a": 1}, "got 'a' twice"),
        ((), {"a": 1}, "misses b"),
    ):
        with pytest.raises(TypeError, match=words):
            toy.toy(*arguments, **named)
    assert pickle.loads(pickle.dumps(toy.toy)) is toy.toy
    assert pickle.loads(pickle.dumps(toy.toy_k)) is toy.toy_k


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": [tk.perm(row=1)]}, "row argument 'row' is a name that every template gets"),
        ({"defaults": {"arch": 1}}, "row argument 'arch'"),
        ({"fixtures": "nope"}, "fixtures='nope' is not of the form 'module:attribute'"),
        ({"template": "/etc/passwd"}, "must lie in or below"),
        ({"template": "../toy/toy.c.j2"}, "must lie in or below"),
    ],
)
def test_declarations_that_would_go_wrong_later(changes: dict[str, Any], words: str) -> None:
    def late(a: tk.i32) -> tk.i32:
        return a

    arguments: dict[str, Any] = {"template": "toy/toy.c.j2", "rows": [tk.perm(k=1)], **changes}
    from tunekit.kernel import Scope

    with pytest.raises(tk.DeclarationError, match=words):
        tk.tune(scope=Scope("late"), **arguments)(late)


def test_the_scope_tunekit_is_ours() -> None:
    with pytest.raises(tk.DeclarationError, match="tunekit's own; rename it"):
        tk.Scope("tunekit")


@pytest.mark.parametrize("name", ["toyscope.tune.json", "toyscope.tune.run.json", "toyscope.proofs.json", "box_profile.json"])
def test_a_pipe_in_place_of_a_state_file_hangs_nobody(name: str, tmp_path: Path) -> None:
    """Opening a pipe waits for a writer: reads of state take regular files, and writes replace what lies there."""
    variables = TOY_ENVIRONMENT | {"TUNEKIT_HOME": str(tmp_path / "home"), "TUNEKIT_CACHE": str(tmp_path / "cache")}
    code = (
        "import os, tunekit\nfrom tunekit import _manifest, paths\nfrom tunekit.cpu import this_box\nfrom toy import kernels\n"
        f"folder = paths.state_folder(this_box().key); folder.mkdir(parents=True); os.mkfifo(folder / {name!r})\n"
        "from tunekit.__main__ import main\n"
        "main(['status', '--module', 'toy.kernels', '--scope', 'toyscope'])\n"
        "print(kernels.toy(1, 2)); kernels.toy.manifest_set('k2'); tunekit.lanes()\n"
        "_manifest.save(_manifest.user_path('toyscope'), {'toy': 'k1'}, {'box': this_box().to_json()})\n"
    )
    done = run_python(code, variables, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
