# SPDX-License-Identifier: Apache-2.0
"""Every declaration error, raised at import of the declaring module, naming kernel, row and mend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

import tunekit as tk
from tunekit import declare, dispatch
from tunekit.dispatch import Tuned

ROWS = [tk.perm(k=1), tk.perm(k=2)]


@pytest.fixture(autouse=True)
def clean_registries() -> Iterator[None]:
    tables: list[dict[str, Any]] = [declare._scopes, declare._declared, declare._companions, dispatch._kernels]
    saved = [dict(table) for table in tables]
    yield
    for table, before in zip(tables, saved, strict=True):
        table.clear()
        table.update(before)


def body(a: tk.i32) -> tk.i32:
    return a


def declare_kernel(function: Any = body, **changes: Any) -> Tuned:
    arguments: dict[str, Any] = {"template": "toy/toy.c.j2", "rows": ROWS, "fallback": "k1", **changes}
    arguments.setdefault("scope", tk.Scope("errors"))
    return tk.tune(**arguments)(function)


def refused(match: str, function: Any = body, **changes: Any) -> None:
    with pytest.raises(tk.DeclarationError, match=match):
        declare_kernel(function, **changes)


def test_a_good_declaration_is_the_real_symbol() -> None:
    tuned = declare_kernel()
    assert tuned.__name__ == "body"
    assert tuned.kernel.key == "errors.body"
    assert [row.suffix for row in tuned.kernel.rows] == ["k1", "k2"]
    assert tuned.signature.prototype("f") == "int32_t f(int32_t a)"


def test_no_template() -> None:
    refused(r"kernel 'body'.*no template; give template=", template="")


def test_template_that_is_not_there() -> None:
    refused(r"kernel 'body': template 'nowhere/x.c.j2' is neither in .* correct the path", template="nowhere/x.c.j2")


def test_no_rows() -> None:
    refused(r"kernel 'body'.*no rows; give rows=", rows=[])


def test_a_row_that_is_none() -> None:
    refused(r"kernel 'body': row 'k1' is not a tunekit.perm", rows=["k1"])


def test_duplicate_suffix() -> None:
    refused(r"kernel 'body': row 'k1' appears twice", rows=[tk.perm(k=1), tk.perm(k=1)])


def test_fallback_entry_behind_the_first_runnable_one_is_checked_too() -> None:
    refused(r"kernel 'body': fallback entry 'k7' is not in the grid", fallback="k1;k7")


def test_reference_is_legal_anywhere_in_the_chain() -> None:
    assert declare_kernel(fallback="reference;k1").kernel.fallback == ("reference", "k1")


def test_malformed_requires() -> None:
    refused(r"kernel 'body', row 'k1'.*\(", rows=[tk.perm(k=1, requires="(avx2)")])


def test_missing_return_annotation() -> None:
    def silent(a: tk.i32):  # type: ignore[no-untyped-def]
        return a

    refused(r"kernel 'silent'.*no return annotation; write -> None", silent)


def test_missing_parameter_annotation() -> None:
    def bare(a) -> tk.i32:  # type: ignore[no-untyped-def]
        return a

    refused(r"kernel 'bare': parameter 'a' has no annotation", bare)


def test_annotation_without_a_c_type() -> None:
    def odd(a: dict) -> None:  # type: ignore[type-arg]
        del a

    refused(r"kernel 'odd': parameter 'a' is annotated <class 'dict'>, which has no C type; use one of i8", odd)


def test_return_annotation_without_a_c_type() -> None:
    def odd(a: tk.i32) -> str:
        return str(a)

    refused(r"kernel 'odd': its return annotation .* has no C type", odd)


def test_annotation_that_cannot_be_evaluated() -> None:
    def odd(a: "nowhere.i32") -> None:  # type: ignore[name-defined]  # noqa: F821, UP037
        del a

    odd.__annotations__["a"] = "nowhere.i32"
    refused(r"kernel 'odd': its annotations cannot be evaluated .*import every name", odd)


def test_keyword_only_and_default_parameters() -> None:
    def worded(*, a: tk.i32) -> None:
        del a

    def lenient(a: tk.i32 = 1) -> None:
        del a

    refused("parameter 'a' is not positional", worded)
    refused("parameter 'a' has a default", lenient)


def test_size_that_names_no_parameter_or_is_no_expression() -> None:
    def unknown(y: Annotated[tk.Out[tk.f32], "m"], n: tk.i32) -> None:
        del y, n

    def call(y: Annotated[tk.Out[tk.f32], "f(n)"], n: tk.i32) -> None:
        del y, n

    refused(r"size 'm' of parameter 'y' names m, which is no integer parameter", unknown)
    refused(r"size 'f\(n\)' of parameter 'y': it may hold integer parameters", call)


def test_companion_that_is_not_declared() -> None:
    refused(r"kernel 'body': companion 'sibling' is not declared; write the function above", companions=["sibling"])


def test_companion_without_annotations() -> None:
    with pytest.raises(tk.DeclarationError, match=r"companion 'sibling': it has no return annotation"):

        @tk.companion
        def sibling():  # type: ignore[no-untyped-def]
            return 1


def test_companion_twice_equal_to_the_kernel_or_itself_tuned() -> None:
    @tk.companion
    def sibling() -> tk.i32:
        return 1

    refused(r"companion 'sibling' is listed twice; remove one", companions=[sibling, sibling])

    def same() -> tk.i32:
        return 1

    same.__name__ = "body"
    refused(r"companion 'body' has the name of the tuned function", companions=[tk.companion(same)])
    other = declare_kernel()
    refused(r"companion 'body' is itself tuned", companions=[other], scope=other.kernel.scope)


def test_a_companion_belongs_to_one_kernel() -> None:
    @tk.companion
    def shared() -> tk.i32:
        return 1

    scope = declare_kernel(companions=[shared]).kernel.scope

    def second(a: tk.i32) -> tk.i32:
        return a

    refused(
        r"kernel 'second': companion 'shared' already belongs to errors.body", second, companions=[shared], scope=scope
    )


def test_two_scopes_of_one_name() -> None:
    tk.Scope("twice")
    with pytest.raises(
        tk.DeclarationError, match=r"scope 'twice' is declared twice in this process: at .*: rename one|rename"
    ):
        tk.Scope("twice")


def test_two_kernels_of_one_name() -> None:
    scope = declare_kernel().kernel.scope

    def body(a: tk.i32) -> tk.i32:
        return a + 1

    refused(r"kernel 'errors.body' is declared twice in this process", body, scope=scope)


@pytest.mark.parametrize("name", ["", "1st", "a b", "a__b", "int", "class", "ä"])
def test_names_that_c_cannot_spell(name: str) -> None:
    with pytest.raises(tk.DeclarationError, match="the name must be a C identifier"):
        tk.Scope(name)


def test_flags_that_select_instructions_are_not_cflags() -> None:
    refused(r"kernel 'body': cflags entry '-mavx2'.*come from requires= or targets=", cflags=["-mavx2"])


def test_a_scope_that_is_none() -> None:
    refused(r"kernel 'body': scope must be a tunekit.Scope, not str", scope="mylib")


def test_a_reload_is_no_second_declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    (tmp_path / "reloaded_family.py").write_text(
        "import tunekit as tk\n"
        "SCOPE = tk.Scope('reloaded')\n"
        "@tk.tune(scope=SCOPE, template='toy.c.j2', rows=[tk.perm(k=1)])\n"
        "def f(a: tk.i32) -> tk.i32:\n"
        "    return a\n"
    )
    (tmp_path / "toy.c.j2").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("reloaded_family")
    assert importlib.reload(module).f.kernel.key == "reloaded.f"
