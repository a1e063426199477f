# SPDX-License-Identifier: Apache-2.0
"""Faults of authors and of releases, each with the right end: another release's rows, wrong rows, instructions and
symbols that a row should not have, code that exits or prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import TOY_ENVIRONMENT
from tunekit.build_tools import build_cached, build_into, foreign
from tunekit.build_tools.disassembly import parse

import tunekit as tk
from tunekit import _verdicts, dispatch
from tunekit.cpu import this_cpu

X86 = pytest.mark.skipif(this_cpu().arch != "x86_64", reason="the instructions are those of x86-64")

KERNELS = '''
"""One kernel on arrays, as the author's guide has it."""
import tunekit as tk
from typing import Annotated
import numpy as np

SCOPE = tk.Scope("NAME")


def samples():
    from tunekit.measure.fixtures import Sample

    found = [np.arange(n, dtype=np.float32) for n in (0, 1, 7, 65536)]
    return [Sample(f"n={x.size}", (x.copy(), x, 0.5, x.size), work=x.size // 60000) for x in found]


@tk.tune(scope=SCOPE, template="axpy.c.j2", reference="axpy.c.j2", defaults={"k": 1},
         rows=[tk.perm(k=1), tk.perm(k=2), tk.perm(k=4)], fallback="k2;k1", fixtures="NAME.kernels:samples")
def axpy(y: Annotated[tk.InOut[tk.f32], "n"], x: Annotated[tk.In[tk.f32], "n"], a: tk.f32, n: tk.i32) -> None:
    """y += a * x."""
    y += np.float32(a) * x
'''

TEMPLATE = """
#include <stdint.h>
${ proto("axpy") }
{
    for (int32_t i = 0; i < n; i++)
        y[i] += a * x[i];
}
"""


class Package:
    """A package ``NAME`` with an entry point, as an install leaves it, in a folder of its own."""

    def __init__(self, root: Path, name: str, kernels: str = KERNELS, template: str = TEMPLATE, points: str | None = None) -> None:
        self.root, self.name, self.folder = root, name, root / name
        self.folder.mkdir(parents=True)
        (self.folder / "__init__.py").write_text("")
        info = root / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        scope = points if points is not None else name
        (info / "entry_points.txt").write_text(f"[tunekit.families]\n{scope} = {name}.kernels\n")
        self.write(kernels, template)

    def write(self, kernels: str = KERNELS, template: str = TEMPLATE) -> None:
        (self.folder / "kernels.py").write_text(kernels.replace("NAME", self.name))
        (self.folder / "axpy.c.j2").write_text(template)

    def build(self) -> str:
        """What an install builds beside the declaring file; what it said."""
        for old in self.folder.glob("_tk_*"):
            old.unlink()
        code = f"""
            from pathlib import Path
            from tunekit import dispatch
            import {self.name}.kernels
            from tunekit.build_tools import build_into
            build_into(dispatch.kernels({self.name!r}), Path({str(self.folder)!r}), Path({str(self.root / "objects")!r}))
        """
        done = python(["-c", textwrap.dedent(code)], self.root)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def call(self, body: str = "", variables: Mapping[str, str] | None = None) -> list[str]:
        """y[1] after a call with y = 1, x = 2, a = 0.5; then row and reason."""
        code = f"""
            import numpy as np, warnings
            warnings.simplefilter("always")
            import {self.name}.kernels as k
            y = np.ones(4, np.float32)
            k.axpy(y, np.full(4, 2, np.float32), 0.5, 4)
            print(float(y[1]), k.axpy.choice().suffix, k.axpy.choice().source, k.axpy.choice().tier)
            {body}
        """
        done = python(["-c", textwrap.dedent(code)], self.root, variables)
        assert done.returncode == 0, done.stderr
        return [*done.stdout.split(), done.stderr]


def python(
    words: list[str], root: Path, variables: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **TOY_ENVIRONMENT, "PYTHONPATH": str(root), **(variables or {})}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=root if root.is_dir() else root.parent, capture_output=True, text=True,
        timeout=timeout, check=False,
    )


@pytest.fixture
def package(tmp_path: Path) -> Callable[..., Package]:
    return lambda name, *words, **named: Package(tmp_path / "site", name, *words, **named)


# --- another release ---------------------------------------------------------------------------------------


@pytest.mark.build
def test_an_upgraded_package_runs_no_row_of_the_old_release(package: Callable[..., Package]) -> None:
    up = package("up")
    up.build()
    (_manifest_file(up)).write_text('{"axpy": "k4"}')  # k4 stands in no module that an install builds
    done = python(["-m", "tunekit", "build", "--scope", "up", "--grid"], up.root)
    assert done.returncode == 0, done.stderr
    assert up.call()[:4] == ["2.0", "k4", "manifest", "c"]
    up.write(KERNELS.replace("y += ", "y -= "), TEMPLATE.replace("y[i] +=", "y[i] -="))
    up.build()
    value, suffix, source, tier, said = up.call()
    assert (value, suffix, source, tier) == ("0.0", "k2", "fallback", "c")
    assert "from another release of the package" in said and "python -m tunekit build --scope up" in said
    status = python(["-m", "tunekit", "status", "--scope", "up"], up.root)
    assert "from another release of the package" in status.stdout
    done = python(["-m", "tunekit", "build", "--scope", "up"], up.root)
    assert done.returncode == 0, done.stderr
    assert up.call()[:4] == ["0.0", "k4", "manifest", "c"]


def _manifest_file(package: Package) -> Path:
    code = f"from tunekit import _manifest; p = _manifest.user_path({package.name!r}); p.parent.mkdir(parents=True, exist_ok=True); print(p)"
    return Path(python(["-c", code], package.root).stdout.strip())


@pytest.mark.build
def test_two_releases_that_share_a_cache_each_run_their_own(tmp_path: Path) -> None:
    old, new = Package(tmp_path / "old", "up"), Package(tmp_path / "new", "up")
    new.write(KERNELS.replace("y += ", "y -= "), TEMPLATE.replace("y[i] +=", "y[i] -="))
    _manifest_file(old).write_text('{"axpy": "k4"}')
    for release in (old, new, old, new):
        release.build()
        assert python(["-m", "tunekit", "build", "--scope", "up"], release.root).returncode == 0
    for _ in range(2):
        assert old.call()[:4] == ["2.0", "k4", "manifest", "c"]
        assert new.call()[:4] == ["0.0", "k4", "manifest", "c"]


@pytest.mark.build
def test_what_a_context_helper_says_is_part_of_a_release(package: Callable[..., Package]) -> None:
    kernels = KERNELS.replace("fixtures=", 'context=lambda row: {"scale": SCALE}, fixtures=').replace("SCOPE =", "SCALE = 1\nSCOPE =")
    up = package("up", kernels, TEMPLATE.replace("a * x", "${ scale } * a * x"))
    up.build()
    _manifest_file(up).write_text('{"axpy": "k4"}')
    assert python(["-m", "tunekit", "build", "--scope", "up"], up.root).returncode == 0
    up.write(kernels.replace("SCALE = 1", "SCALE = 3"), TEMPLATE.replace("a * x", "${ scale } * a * x"))
    up.build()
    assert up.call()[:4] == ["4.0", "k2", "fallback", "c"]


@pytest.mark.build
def test_an_editable_install_runs_what_a_retune_built_from_its_changed_templates(package: Callable[..., Package]) -> None:
    up = package("up")
    up.build()
    up.write(template=TEMPLATE.replace("y[i] +=", "y[i] -="))  # and no new install
    _manifest_file(up).write_text('{"axpy": "k4"}')
    assert python(["-m", "tunekit", "build", "--scope", "up"], up.root).returncode == 0
    assert up.call()[:4] == ["0.0", "k4", "manifest", "c"]


@pytest.mark.build
def test_without_a_module_of_the_install_the_templates_say_which_release_this_is(package: Callable[..., Package]) -> None:
    up = package("up")
    assert python(["-m", "tunekit", "build", "--scope", "up"], up.root).returncode == 0
    assert up.call()[:4] == ["2.0", "k2", "fallback", "c"]
    up.write(KERNELS.replace("y += ", "y -= "), TEMPLATE.replace("y[i] +=", "y[i] -="))
    value, suffix, _, tier, said = up.call()
    assert (value, suffix, tier) == ("0.0", "reference", "python")
    assert "from another release of the package" in said


# --- rows that are wrong -----------------------------------------------------------------------------------


@pytest.mark.build
def test_a_row_of_the_chain_that_fails_its_checks_does_not_run_and_the_others_are_raced(package: Callable[..., Package]) -> None:
    wrong = TEMPLATE.replace("    for (", "//% if k == 2\n    if (n > 3) y[0] += 1;\n//% endif\n    for (", 1)
    up = package("up", template=wrong)
    up.build()
    assert up.call("print(k.axpy.choice().suffix)")[1] == "k2"
    done = python(["-m", "tunekit.retune", "--scope", "up", "--json", "--no-probe"], up.root)
    assert done.returncode == 1, done.stderr
    (found,) = json.loads(done.stdout)["scopes"]
    kernel = found["kernels"]["axpy"] if "kernels" in found else found["record"]["kernels"]["axpy"]
    assert kernel["rows"]["k2"]["verdict"] == "rejected" and kernel["fallback"] == "k1"
    assert kernel["winner"] in ("k1", "k4", "reference")
    _manifest_file(up).unlink()
    value, suffix, source, tier, said = up.call()
    assert (value, suffix, source, tier) == ("2.0", "k1", "fallback", "c")
    assert said.count("k2 is passed over: it failed a check on this box") == 1
    for words in (["status", "--scope", "up"], ["status", "--why-not", "up.axpy", "k2"]):
        assert "it failed a check on this box" in python(["-m", "tunekit", *words], up.root).stdout
    assert up.call(variables={"TUNEKIT_PIN": "up.axpy=k2"})[1] == "k1"
    up.write()
    up.build()  # the mended release is another object
    assert up.call()[1] == "k2"


def test_a_verdict_is_about_an_object_and_a_later_pass_ends_it(toy: Any) -> None:
    kernel = toy.toy.kernel
    assert toy.toy.choice().suffix == "k1"
    dispatch.judged(kernel, {("k1", ()): "sums: wrong", ("reference", ()): "adds: wrong"})
    choice = toy.toy.choice()
    assert (choice.suffix, choice.tier) == ("reference", "python")
    assert "k1 is passed over: it failed a check on this box (sums: wrong, 20" in " ".join(choice.warnings)
    assert "the C reference is not run" in choice.reason
    assert set(dispatch.grid_rows(kernel)) >= {"reference", "k1"}, "a tuner asks them again"
    dispatch.judged(kernel, {("k1", ()): None})
    assert toy.toy.choice().suffix == "k1"
    assert next(iter(_verdicts.failures("toyscope").values())).startswith("adds: wrong")


@pytest.mark.parametrize("text", ["", "[]", '{"failed objects": 3}', '{"failed objects": {"x": 3}}', "[" * 100_000])
def test_a_torn_file_of_verdicts_says_nothing(toy: Any, text: str) -> None:
    path = _verdicts.path_of("toyscope")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert toy.toy.choice().suffix == "k1"
    dispatch.judged(toy.toy.kernel, {("k1", ()): "wrong"})
    assert toy.toy.choice().suffix == "reference"


# --- instructions and symbols that a row should not have -----------------------------------------------------


def declared(package: Package) -> tuple[Any, ...]:
    from tunekit.build_tools.hook import declare_alone

    return declare_alone(package.folder / "kernels.py")


HIDDEN = {
    "target attribute": (
        '__attribute__((target("avx512f"))) static void add(float *y) '
        "{ _mm512_storeu_ps(y, _mm512_add_ps(_mm512_loadu_ps(y), _mm512_loadu_ps(y))); }",
        "if (n > 15) add(y);", "avx512f",
    ),
    "pragma": (
        '#pragma GCC push_options\n#pragma GCC target("avx2")\nstatic void add(float *y) '
        "{ _mm256_storeu_si256((__m256i *)y, _mm256_add_epi32(_mm256_loadu_si256((__m256i *)y), _mm256_set1_epi32(n0))); }\n"
        "#pragma GCC pop_options", "if (n > 15) add(y);", "avx",
    ),
    "assembly": ("", '__asm__("vpdpbusd %zmm0, %zmm1, %zmm2");', "avx512"),
}  # fmt: skip


@X86
@pytest.mark.build
@pytest.mark.parametrize("kind", HIDDEN)
def test_an_instruction_that_gets_past_the_flags_costs_its_row_alone(package: Callable[..., Package], tmp_path: Path, kind: str) -> None:
    helper, call, feature = HIDDEN[kind]
    head = f"//% if k == 2\n#include <immintrin.h>\nstatic const int n0 = 3;\n{helper}\n//% endif\n"
    text = TEMPLATE.replace("#include <stdint.h>\n", "#include <stdint.h>\n" + head)
    text = text.replace("    for (", f"//% if k == 2\n    {call}\n//% endif\n    for (")
    name = "hidden_" + kind.split()[0]
    kernels = declared(package(name, template=text))
    report = build_into(kernels, tmp_path / "out", tmp_path / "objects")
    assert report.built[f"{name}.axpy"] == ["reference", "k1"]
    why = report.dropped[f"{name}.axpy"]["k2"]
    assert re.search(rf"holds the instruction 'v\w+ .*', which needs {feature}\w*, and the row does not have that", why)
    assert build_into(kernels, tmp_path / "out", tmp_path / "objects").dropped == report.dropped, "objects of before"


@X86
@pytest.mark.build
def test_a_target_attribute_within_requires_is_fine_and_one_in_the_reference_is_not(package: Callable[..., Package], tmp_path: Path) -> None:
    helper, call, _ = HIDDEN["target attribute"]
    head = f"//% if k == 2\n#include <immintrin.h>\n{helper}\n//% endif\n"
    text = TEMPLATE.replace("#include <stdint.h>\n", "#include <stdint.h>\n" + head)
    text = text.replace("    for (", f"//% if k == 2\n    {call}\n//% endif\n    for (")
    kernels = declared(package("within", KERNELS.replace("tk.perm(k=2)", 'tk.perm(k=2, requires="avx512f")'), text))
    assert build_into(kernels, tmp_path / "out", tmp_path / "objects").built["within.axpy"] == ["reference", "k1", "k2"]
    kernels = declared(package("wrong_reference", template=text.replace("k == 2", 'row == "reference"')))
    with pytest.raises(tk.ToolchainError, match="the portable C reference of wrong_reference.axpy .*avx512f"):
        build_into(kernels, tmp_path / "out", tmp_path / "objects")


@X86
@pytest.mark.build
def test_where_nothing_reads_objects_back_the_build_says_so(
    package: Callable[..., Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunekit.build_tools import objects

    kernels = declared(package("unread"))
    assert build_into(kernels, tmp_path / "out", tmp_path / "objects").unread == ""
    before = {path.name for path in (tmp_path / "objects").glob("*.o")}
    objects.disassemblers.cache_clear()
    monkeypatch.setattr(objects, "find_disassemblers", lambda *words: (_ for _ in ()).throw(tk.ToolchainError("no objdump here")))
    try:
        assert build_into(kernels, tmp_path / "out", tmp_path / "objects").unread == "no objdump here"
    finally:
        objects.disassemblers.cache_clear()
    assert before < {path.name for path in (tmp_path / "objects").glob("*.o")}, "an object that was read is another one"


@pytest.mark.parametrize(
    ("features", "text", "needs"),
    [
        (("avx512f",), "vpternlogd $0x1,%ymm0,%ymm1,%ymm2", "avx512vl"),
        (("avx2",), "vpternlogd $0x1,%zmm0,%zmm1,%zmm2", "avx512f"),
        (("avx512f",), "vpaddb %zmm0,%zmm1,%zmm2", "avx512bw"),
        (("avx512bw",), "vmovdqu8 (%rdx,%rdi,1),%ymm0", ""),
        (("avx512bw",), "vmovdqu8 (%rdx,%rdi,1),%ymm0{%k1}", "avx512vl"),
        (("avx512f",), "vmovdqu8 (%rdx,%rdi,1),%ymm0", "avx512bw"),
        (("avx512f",), "vpaddd %zmm0,%zmm1,%zmm2", ""),
        (("avx512f",), "vpcmpgtd %ymm0,%ymm1,%k1", "avx512vl"),
        (("avx512f",), "vaddps %xmm0,%xmm1,%xmm2{%k1}", "avx512vl"),
        (("avx512f",), "vaddss %xmm0,%xmm1,%xmm2{%k1}", ""),
        (("avx512bw",), "vpermb %zmm0,%zmm1,%zmm2", "avx512vbmi"),
        (("avx512f",), "vpopcntq %zmm0,%zmm1", "avx512vpopcntdq"),
        (("avx512f",), "vpmullq %zmm0,%zmm1,%zmm2", "avx512dq"),
        (("avx512f",), "vcvtps2ph $0x0,%zmm0,%ymm1", ""),
        (("avx",), "vpaddd %ymm0,%ymm1,%ymm2", "avx2"),
        (("avx",), "vpaddd %xmm0,%xmm1,%xmm2", ""),
        (("avx",), "vptest %ymm0,%ymm1", ""),
        (("avx",), "vbroadcastss %xmm0,%ymm1", "avx2"),
        (("avx",), "vbroadcastss (%rdi),%ymm1", ""),
        (("avx2",), "vcvtph2ps %xmm0,%ymm1", "f16c"),
        (("avx2",), "vaesenc %ymm0,%ymm1,%ymm2", "vaes"),
        (("avx2",), "andn %eax,%ebx,%ecx", "bmi"),
        (("bmi",), "andn %eax,%ebx,%ecx", ""),
        ((), "tzcnt %eax,%ebx", ""),
        ((), "popcnt %eax,%ebx", "popcnt"),
        ((), "pshufb %xmm0,%xmm1", "ssse3"),
        ((), "pmulld %xmm0,%xmm1", "sse4.1"),
        ((), "pcmpgtq %xmm0,%xmm1", "sse4.2"),
        ((), "vzeroupper", "avx"),
        (("amx-tile",), "tdpbssd %tmm0,%tmm1,%tmm2", "amx-int8"),
        (("avx512bw",), "vaddph %zmm0,%zmm1,%zmm2", "avx512fp16"),
    ],
)
def test_instructions_are_known_by_register_encoding_and_name(features: tuple[str, ...], text: str, needs: str) -> None:
    from tunekit.cpu.features import KNOWN_FEATURES, implied

    functions = parse(f"0000000000000000 <f>:\n   0:\t{text}\n", "x86_64")
    found = list(foreign.scan(functions, "x86_64", implied(features)))
    assert needs in [what for _, what in found] if needs else not found
    assert {name for rules in foreign.RULES.values() for _, _, any_of in rules for name in any_of} <= KNOWN_FEATURES


@pytest.mark.build
@pytest.mark.parametrize("helper", ["int32_t helper(int32_t n) { return n; }", "int32_t helper;", "int32_t helper = 3;"])
def test_a_helper_that_is_not_static_is_the_authors_fault_and_named(package: Callable[..., Package], tmp_path: Path, helper: str) -> None:
    text = TEMPLATE.replace("#include <stdint.h>\n", f"#include <stdint.h>\n//% if k != 1\nint32_t helper_declared(int32_t n);\n{helper}\n//% endif\n")
    name = f"shared{len(helper)}"
    kernels = declared(package(name, template=text))
    with pytest.raises(tk.TemplateError, match=rf"kernel {name}.axpy, row k2: 'helper' is not static.*make it static"):
        build_into(kernels, tmp_path / "out", tmp_path / "objects")
    with pytest.raises(tk.TemplateError, match=rf"kernel {name}.axpy, rows k2, k4: 'helper' is not static"):
        build_cached(kernels, "grid")


# --- code that exits, prints, or cannot be imported ----------------------------------------------------------

EXITS = {
    "samples": ("    found = [np", '    raise SystemExit("I am done")\n    found = [np'),
    "work": ("    found = [np", "    raise GeneratorExit\n    found = [np"),
    "child": ("    found = [np", '    import os, sys\n    if "tunekit.measure.child" in str(sys.orig_argv): os._exit(7)\n    found = [np'),
}  # fmt: skip


@pytest.mark.build
@pytest.mark.parametrize("kind", EXITS)
def test_a_family_whose_code_exits_fails_by_name_and_the_others_are_tuned(tmp_path: Path, kind: str) -> None:
    bad = Package(tmp_path / "site", "aa", KERNELS.replace(*EXITS[kind]))
    good = Package(tmp_path / "site", "bb")
    words = ["-m", "tunekit.retune", "--scope", "aa", "--scope", "bb", "--json", "--no-probe", "--time-limit", "60"]
    done = python(words, bad.root)
    assert done.returncode == 1, done.stderr
    first, second = json.loads(done.stdout)["scopes"]
    assert (first["scope"], first["status"], first["manifest"]) == ("aa", 1, None)
    said = first["record"]["kernels"]["axpy"]["reason"]
    assert re.search({"samples": "aa.axpy.*SystemExit: I am done", "work": "aa.axpy.*GeneratorExit"}.get(kind, "exit status 7"), said)
    assert (second["scope"], second["status"]) == ("bb", 0) and Path(second["manifest"]).is_file()
    assert good.name == "bb"


@pytest.mark.build
def test_a_template_of_one_family_does_not_end_the_run_of_the_others(tmp_path: Path) -> None:
    bad = Package(tmp_path / "site", "aa", template="${ nowhere }" + TEMPLATE)
    Package(tmp_path / "site", "bb")
    done = python(["-m", "tunekit.retune", "--scope", "aa", "--scope", "bb", "--json", "--no-probe"], bad.root)
    assert done.returncode == 1, done.stderr
    scopes = {entry["scope"]: entry for entry in json.loads(done.stdout)["scopes"]}
    assert "'nowhere' is undefined" in scopes["aa"]["problem"] and scopes["bb"]["manifest"]


@pytest.mark.build
def test_a_document_is_json_whatever_the_authors_code_prints(tmp_path: Path) -> None:
    noise = 'import os\nprint("chatter", flush=True)\nos.write(1, b"raw chatter\\n")\n'
    inside = "".join(f"    {line}\n" for line in noise.splitlines())
    kernels = noise + "import ctypes\nctypes.CDLL(None).puts(b'C chatter')\n" + KERNELS.replace("    found = [np", f"{inside}    found = [np")
    package = Package(tmp_path / "site", "aa", kernels)
    for words in (
        ["-m", "tunekit", "list", "--json"], ["-m", "tunekit", "status", "--scope", "aa", "--json"],
        ["-m", "tunekit", "status", "--why-not", "aa.axpy", "--json"], ["-m", "tunekit", "build", "--scope", "aa", "--json"],
        ["-m", "tunekit.retune", "--scope", "aa", "--json", "--no-probe"], ["-m", "tunekit", "retune", "--scope", "aa", "--json", "--no-probe"],
        ["-m", "tunekit", "verify", "--scope", "aa", "--execution", "--json", "--in-process"],
        ["-m", "tunekit", "manifest", "show", "--json"],
    ):  # fmt: skip
        done = python(words, package.root)
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)
        if "manifest" not in words:
            assert {"chatter", "raw chatter", "C chatter"} <= set(done.stderr.splitlines()), words
    done = python(["-m", "tunekit", "list"], package.root)
    assert "raw chatter" in done.stdout, "without --json it is the author's to say"


def test_a_family_that_cannot_be_imported_is_an_entry_and_a_status(tmp_path: Path) -> None:
    root = Package(tmp_path / "site", "bb").root
    Package(root, "cc", KERNELS.replace('"NAME"', '"bb"').replace('"NAME.', '"cc.'), points="bb")
    Package(root, "dd", "import nothere\n" + KERNELS)
    Package(root, "ee", "raise SystemExit(0)\n" + KERNELS)
    done = python(["-m", "tunekit", "list", "--json"], root)
    assert done.returncode == 1, done.stderr
    problems = {(e["scope"], e["module"]): e["problem"] for e in json.loads(done.stdout)}
    assert "two installed packages declare the scope 'bb'" in problems["bb", "cc.kernels"]
    assert "No module named 'nothere'" in problems["dd", "dd.kernels"]
    assert "SystemExit" in problems["ee", "ee.kernels"]
    assert problems["bb", "bb.kernels"] == ""
    plain = python(["-m", "tunekit", "list"], root)
    assert plain.returncode == 1 and re.search(r"dd +cannot be used +dd.kernels", plain.stdout)


@pytest.mark.build
def test_one_broken_scope_leaves_the_other_tuned(tmp_path: Path) -> None:
    root = Package(tmp_path / "site", "bb").root
    Package(root, "dd", "import nothere\n" + KERNELS)
    done = python(["-m", "tunekit.retune", "--scope", "bb", "--scope", "dd", "--json", "--no-probe"], root)
    assert done.returncode == 1, done.stderr
    scopes = {entry["scope"]: entry for entry in json.loads(done.stdout)["scopes"]}
    assert scopes["bb"]["status"] == 0 and scopes["bb"]["manifest"]
    assert scopes["dd"]["status"] == 1 and "No module named 'nothere'" in scopes["dd"]["problem"]
    assert python(["-m", "tunekit.retune", "--scope", "nowhere", "--no-probe"], root).returncode == 2


# --- names -------------------------------------------------------------------------------------------------


def declare_names(kernel: str, parameter: str) -> Any:
    """A declaration with these names, by a function of that name and parameter."""
    space: dict[str, Any] = {"tk": tk, "Path": Path}
    (Path(__file__).parent / "toy" / "toy.c.j2").stat()
    code = f"def {kernel}({parameter}: tk.i32) -> tk.i32:\n    return {parameter}\n"
    exec(compile(code, str(Path(__file__).parent / "toy" / "kernels.py"), "exec"), space)
    return tk.tune(scope=SCOPE_OF_NAMES, template="toy/toy.c.j2", rows=[tk.perm(k=1)])(space[kernel])


SCOPE_OF_NAMES = tk.Scope("names_scope")
TAKEN = (
    "xor bitand compl not_eq explicit friend mutable typename using typeid decltype constexpr nullptr noexcept "
    "static_assert thread_local wchar_t char8_t co_await consteval requires typeof typeof_unqual alignas asm "
    "include cdef cpdef cimport ctypedef DEF ELIF print"
).split()
FREE = "self cls final override module by_the_way typed value_type restrict_ nogil_ object_ len range np".split()


@pytest.mark.parametrize("name", TAKEN)
def test_words_of_c_cpp_and_cython_are_no_names(name: str) -> None:
    with pytest.raises(tk.DeclarationError, match="keyword of C, C\\+\\+"):
        declare_names(name, "a")
    with pytest.raises(tk.DeclarationError, match="a keyword of C, C\\+\\+ or Cython"):
        declare_names("names_free", name)


def test_consumers_of_every_language_take_the_names_that_are_free(tmp_path: Path) -> None:
    """Header in C and C++, .pxd in Cython, .pyi in Python: with each free name as a parameter, and as a kernel."""
    import shutil

    from tunekit.build_tools.interface import interface

    from tunekit.linking import Unit

    kernels = [declare_names(f"names_{i}", name).kernel for i, name in enumerate(FREE)]
    kernels += [declare_names(name, "a").kernel for name in FREE if name != "self"]
    texts = interface(Unit("names.kernels", tuple(kernels)))
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    compile(texts["kernels.pyi"], "kernels.pyi", "exec")  # a name that stands twice among parameters shows here alone
    body = '#include "names_kernels.h"\nint main(void) { return sizeof(names_kernels_api) == 0; }\n'
    for words in (("gcc", "-std=c99", "-x", "c"), ("g++", "-std=c++17", "-x", "c++"), ("g++", "-std=c++20", "-x", "c++")):
        if shutil.which(words[0]) is None:
            continue
        (tmp_path / "a.c").write_text(body)
        done = subprocess.run([*words, "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", "a.c"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), words
    pytest.importorskip("Cython")
    (tmp_path / "use.pyx").write_text("from names_kernels cimport names_kernels_api, names_kernels_import\ncdef const names_kernels_api *api = names_kernels_import()\n")
    done = subprocess.run([sys.executable, "-m", "cython", "-3", "use.pyx"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_prefix_with_a_space_is_one_word_for_the_compiler(toy: Any, tmp_path: Path) -> None:
    import importlib.util
    import shlex

    from tunekit.build_tools.interface import write_interface

    from tunekit.linking import unit_of

    if importlib.util.find_spec("pkgconf") is None:
        pytest.skip("needs pkgconf")
    folder = tmp_path / "a prefix" / "pkg"
    folder.mkdir(parents=True)
    write_interface(unit_of("toy.kernels"), folder)
    environment = {**os.environ, "PKG_CONFIG_PATH": str(folder / "tk_include")}
    done = subprocess.run([sys.executable, "-m", "pkgconf", "--cflags", "toy_kernels"], env=environment, capture_output=True, text=True, check=True)
    assert shlex.split(done.stdout) == [f"-I{folder / 'tk_include'}"]


# --- templates that are not on disk ------------------------------------------------------------------------


@pytest.mark.build
def test_without_templates_the_built_rows_run_and_only_a_build_needs_them(package: Callable[..., Package]) -> None:
    up = package("up")
    up.build()
    (up.folder / "axpy.c.j2").unlink()
    assert up.call()[:4] == ["2.0", "k2", "fallback", "c"]
    assert python(["-m", "tunekit", "status", "--scope", "up"], up.root).returncode == 0
    done = python(["-m", "tunekit", "build", "--scope", "up", "--grid"], up.root)
    assert done.returncode == 2 and "template 'axpy.c.j2' is neither in" in done.stderr
    done = python(["-m", "tunekit.retune", "--scope", "up", "--json", "--no-probe"], up.root)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["scopes"]
    assert "the grid was not built" in " ".join(found["notes"]) and found["manifest"]


def test_in_an_archive_the_python_body_runs_and_says_why(tmp_path: Path) -> None:
    import zipfile

    package = Package(tmp_path / "site", "zz")
    archive = tmp_path / "app.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in package.folder.iterdir():
            file.write(path, f"zz/{path.name}")
    code = (
        "import numpy as np, zz.kernels as k, tunekit\ny = np.ones(4, np.float32)\nk.axpy(y, np.full(4, 2, np.float32), 0.5, 4)\n"
        "print(y[1], k.axpy.choice().tier, tunekit.status()[0].reason)"
    )
    done = python(["-c", code], archive)  # the archive is on the path, and no folder to start in
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2.0 python ") and "its templates are not on disk" in done.stdout


# --- text, titles and features -----------------------------------------------------------------------------


def test_text_is_no_number_in_a_call() -> None:
    import numpy as np

    from tunekit.signature import check_call, signature_of

    def f(a: tk.f32) -> None:
        del a

    signature = signature_of(f, "kernel 'f'")
    for bad in ("0.5", b"0.5", bytearray(b"1"), memoryview(b"1"), np.str_("0.5"), np.bytes_(b"0.5"), np.array("0.5"), np.array("0.5", object), None):
        with pytest.raises(TypeError, match="a must be a number"):
            check_call("f", signature, (bad,))
    for good in (0.5, 1, True, np.float32(0.5), np.int8(1), np.array(0.5)):
        assert check_call("f", signature, (good,)) == [float(good)]


@pytest.mark.parametrize("title", ["two\nlines", "bell\a", "", "\x1b[2J", 3])
def test_titles_are_one_line_of_text(title: Any) -> None:
    from tunekit.measure.fixtures import GateCase, Regime, Sample

    for make in (lambda: Sample(title, ()), lambda: GateCase(title, str), lambda: Regime(title, 1.0, prepare=lambda row: print)):
        with pytest.raises(ValueError, match="must be text on one line"):
            make()
    assert Sample("n=3, größte", ()).name


def test_a_name_that_is_no_feature_is_refused_with_those_there_are() -> None:
    def kernel(a: tk.i32) -> tk.i32:
        return a

    for row, targets, words in (
        (tk.perm(k=1, requires="avx2,avx3"), None, "requires names 'avx3', which is no feature"),
        (tk.perm(k=1, requires="avx512_vnni"), None, "did you mean 'avx512vnni'"),
        (tk.perm(k=1), lambda row: (("avx3",),), "targets names 'avx3'"),
    ):
        with pytest.raises(tk.DeclarationError, match=rf"row 'k1'.*{words}.*the features are .*avx2, .*sve2"):
            tk.tune(scope=SCOPE_OF_NAMES, template="tunekit/q8q8/row.c.j2", rows=[row], targets=targets)(kernel)


@pytest.mark.build
def test_a_template_that_forgets_its_return_value_does_not_compile(package: Callable[..., Package], tmp_path: Path) -> None:
    kernels = KERNELS.replace("-> None:", "-> tk.f32:").replace('reference="axpy.c.j2", ', "").replace("y += np", "return float(a)\n    y += np")
    report = build_into(declared(package("forgets", kernels)), tmp_path / "out", tmp_path / "objects")
    assert report.built["forgets.axpy"] == [] and set(report.dropped["forgets.axpy"]) == {"k1", "k2"}
    assert "return" in report.dropped["forgets.axpy"]["k1"]


def test_show_takes_the_module_of_a_package_without_an_entry_point(tmp_path: Path) -> None:
    package = Package(tmp_path / "site", "mm", points="other_scope")
    (package.root / "mm-1.dist-info" / "entry_points.txt").unlink()
    done = python(["-m", "tunekit", "show", "mm.axpy", "k1"], package.root)
    assert done.returncode == 2 and "without an entry point are found with --module" in done.stderr
    done = python(["-m", "tunekit", "show", "mm.axpy", "k1", "--module", "mm.kernels"], package.root)
    assert done.returncode == 0 and "tk_mm_axpy__k1" in done.stdout
