# SPDX-License-Identifier: Apache-2.0
"""Declaring tuned kernels: :func:`tune`, :func:`companion`, :class:`Scope`.

Every fault of a declaration is a :class:`~tunekit.errors.DeclarationError` that names the kernel, the row and
the mend, raised when the declaring module is imported and not when somebody calls the kernel.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from tunekit import _manifest, dispatch, linking
from tunekit import kernel as _kernel
from tunekit._lock import lock
from tunekit.cpu.features import KNOWN_FEATURES, suggestion
from tunekit.cpu.requires import parse
from tunekit.dispatch import Tuned, TunedFunction
from tunekit.errors import DeclarationError
from tunekit.kernel import Companion, Kernel, Target
from tunekit.module import PREFIX
from tunekit.rows import REFERENCE, Row, check_grid
from tunekit.signature import C_WORDS, HEADER_WORDS, signature_of

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_C_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")

_TEMPLATE_NAMES = frozenset(("row", "arch", "alternative", "proto", "symbol", "preamble", "fail"))

_scopes: dict[str, tuple[str, int]] = {}
_declared: dict[str, tuple[str, int]] = {}
_companions: dict[str, str] = {}


def _check_name(what: str, name: str) -> None:
    if not _C_NAME.match(name) or "__" in name or name in C_WORDS | HEADER_WORDS or keyword.iskeyword(name):
        raise DeclarationError(
            f"{what} {name!r}: the name must be a C identifier that starts with a letter, has no double underscore "
            f"and is no keyword of C, C++, Cython or Python, or name of C's headers; rename it"
        )
    if name.startswith("tk_") and what != "scope":
        raise DeclarationError(f"{what} {name!r}: names that start with tk_ are tunekit's own; rename it")


def _here(depth: int) -> tuple[str, int]:
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        if frame is not None and frame.f_back is not None:
            frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)


def _claim(what: str, name: str, place: tuple[str, int], table: dict[str, tuple[str, int]]) -> None:
    """Refuse a second declaration of one name; a reload of the same line is no second one."""
    with lock:
        taken = table.get(name)
        if taken is not None and taken != place:
            raise DeclarationError(
                f"{what} {name!r} is declared twice in this process: at {taken[0]}:{taken[1]} and at "
                f"{place[0]}:{place[1]}; rename one, or import the first"
            )
        table[name] = place


class Scope(_kernel.Scope):
    """The owner of a manifest: one library, shared by every application on the box.

    Args:
        name: a C identifier; the manifest is ``<name>.tune.json``.
        tuner: the module that tunes it (``python -m TUNER``); None for tunekit's own tuner.

    Raises:
        DeclarationError: a bad name, or the second scope of that name in this process.
    """

    def __init__(self, name: str, tuner: str | None = None) -> None:
        if not isinstance(name, str):
            raise DeclarationError(f"scope {name!r}: its name must be text")
        _check_name("scope", name)
        place = _here(1)
        own = Path(place[0]).resolve().is_relative_to(Path(__file__).resolve().parent)
        if name.startswith("tk_") or (name == "tunekit" and not own):
            raise DeclarationError(
                f"scope {name!r}: tunekit and names that start with tk_ are tunekit's own; rename it"
            )
        _claim("scope", name, place, _scopes)
        super().__init__(name, tuner)


class CompanionFunction(TunedFunction):
    """A companion before and after it joins its kernel: what :func:`companion` returns."""

    def __init__(self, function: Callable[..., Any], seat: bool | str) -> None:
        super().__init__(function, signature_of(function, f"companion {function.__name__!r}"))
        self.seat = seat if isinstance(seat, str) else function.__name__ if seat else ""


@overload
def companion(function: Callable[..., Any]) -> Any: ...


@overload
def companion(*, seat: bool | str) -> Callable[[Callable[..., Any]], Any]: ...


def companion(function: Callable[..., Any] | None = None, *, seat: bool | str = False) -> Any:
    """Declare a sibling function that is stamped with its kernel's row, never apart from it.

    Args:
        function: the reference body, annotated like a kernel.
        seat: whether it may have a manifest entry of its own, under its name, that gives it another row than its
            kernel's; the kernel's ``layout=`` says which rows may be mixed. The name of another companion: it goes
            with that one, into whatever row that one's entry gives it.

    Raises:
        DeclarationError: an annotation is missing or has no C type, or the name is no C name.
    """

    def wrap(body: Callable[..., Any]) -> CompanionFunction:
        _check_name("companion", body.__name__)
        return CompanionFunction(body, seat)

    return wrap if function is None else wrap(function)


def _template_path(where: str, name: str, file: Path, scope: str) -> None:
    folder = file.parent
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DeclarationError(f"{where}: template {name!r} must lie in or below the declaring file's package")
    if name.startswith("tunekit/"):
        return  # ours; the renderer finds it through importlib.resources
    for root in (folder, folder.parent):
        if (root / name).is_file():
            return
    if not file.is_file() or any(folder.glob(f"{PREFIX}{scope}_*")):
        return  # zipped, frozen or stripped: what was built runs, or the body, and only a build needs the template
    raise DeclarationError(
        f"{where}: template {name!r} is neither in {folder} nor in {folder.parent}; "
        f"correct the path, and list the file in the package data"
    )


def _split_fallback(where: str, fallback: str | Sequence[str], rows: Sequence[Row]) -> tuple[str, ...]:
    parts = fallback.split(";") if isinstance(fallback, str) else list(fallback)
    names = tuple(part.strip() for part in parts if part.strip())
    known = {row.suffix for row in rows} | {REFERENCE}
    for name in names:  # every entry, not only those that a walk would reach
        if name not in known:
            raise DeclarationError(f"{where}: fallback entry {name!r} is not in the grid; correct it or add the row")
    return names


def _join(where: str, own: str, companions: Sequence[Any]) -> list[CompanionFunction]:
    seen: set[str] = set()
    joined = []
    for item in companions:
        if isinstance(item, Tuned):
            raise DeclarationError(
                f"{where}: companion {item.__name__!r} is itself tuned; a companion has no grid of its own"
            )
        if not isinstance(item, CompanionFunction):
            shown = item if isinstance(item, str) else getattr(item, "__name__", repr(item))
            raise DeclarationError(
                f"{where}: companion {shown!r} is not declared; write the function above the kernel, "
                f"decorate it with @tunekit.companion and pass the function itself"
            )
        if item.__name__ == own:
            raise DeclarationError(f"{where}: companion {own!r} has the name of the tuned function; rename it")
        if item.__name__ in seen:
            raise DeclarationError(f"{where}: companion {item.__name__!r} is listed twice; remove one")
        seen.add(item.__name__)
        joined.append(item)
    return joined


def tune_manifest(name: str, dir: str | Path | None = None) -> Path:
    """Declare this application's own manifest, ``<dir>/<name>.tune.json``; its entries win over those of the scopes.

    Entries that it lacks keep the scopes' winners. It holds for the kernels of every library in the process, imported
    before or after this call, and ``manifest_set`` writes there. Its keys are ``scope.kernel``, or a kernel's bare
    name. ``TUNEKIT_MANIFEST`` overrides it.

    Args:
        name: the application's name; two applications that share a folder take two names.
        dir: the folder; by default that of the file that calls this, from which a relative one counts, too.

    Returns:
        The file, whether or not it exists.

    Raises:
        DeclarationError: a bad name, no such folder, or another application manifest in this process.
        ChoiceError: a kernel has been used already, and a choice, once used, is fixed for the process.
    """
    if not isinstance(name, str) or not _FILE_NAME.match(name):
        raise DeclarationError(
            f"application manifest {name!r}: the name must start with a letter or digit and hold letters, digits, "
            f"dots, dashes and underscores; it becomes <name>.tune.json"
        )
    file = _here(1)[0]
    # In a zipped application the file lies in the archive: the archive's folder is the nearest one that there is.
    base = next(folder for folder in Path(file or "-").absolute().parents if folder.is_dir())
    folder = base / (dir if dir is not None else "")
    if not folder.is_dir():
        raise DeclarationError(
            f"application manifest {name!r}: dir={str(dir)!r} is no folder; make it, or name another"
        )
    path = folder / _manifest.file_name(name)
    dispatch.declare_application(path)
    return path


def tune(
    *,
    scope: _kernel.Scope,
    template: str,
    rows: Sequence[Row],
    fallback: str | Sequence[str] = "",
    companions: Sequence[Any] = (),
    reference: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    declines: Callable[[Row, Target], str | None] | None = None,
    targets: Callable[[Row], tuple[tuple[str, ...], ...]] | None = None,
    inside: Callable[[Row], tuple[str, ...]] | None = None,
    context: Callable[[Row | None], dict[str, Any]] | None = None,
    layout: Callable[[Row | None], str] | None = None,
    cflags: Sequence[str] = (),
    fixtures: str | None = None,
) -> Callable[[Callable[..., Any]], Tuned]:
    """Declare a tuned kernel; the decorated function is its reference and stays the real symbol.

    Args:
        scope: who owns the manifest.
        template: the Jinja template of a row's C, ``tunekit/...`` or relative to the declaring file's folder or
            its parent (``mylib/gemm.c.j2``).
        rows: the grid, a list of :func:`perm`.
        fallback: suffixes, best first, separated by ``;``: what runs on a box without a manifest entry.
        companions: functions declared with :func:`companion`.
        reference: the template of a portable C reference, compiled at the architecture's baseline.
        defaults: arguments that the template gets where a row does not spell them.
        declines: ``(row, target) -> reason or None``: the family's one predicate of which rows cannot be emitted.
        targets: ``row -> alternatives``: the features that a row's C is compiled for; default: its ``requires``.
        inside: ``row -> features`` among its targets that the template switches on by itself, for single functions of
            the unit (a ``target`` attribute or pragma); the object needs them, and is not compiled with their flags.
        context: ``row -> dict`` of further names for the template.
        layout: ``row -> name`` of the form that its operands have (None: the reference): rows that agree in it read and
            write the same packed data. A companion with ``seat=True`` may run another row than the kernel's there.
        cflags: further plain compiler flags; none that selects an instruction set.
        fixtures: ``"module:attribute"`` of gates and regimes for ``python -m tunekit.retune``.

    Returns:
        A decorator that returns a :class:`~tunekit.dispatch.Tuned`.

    Raises:
        DeclarationError: anything above is wrong; names the kernel, the row and the mend.
    """
    place = _here(1)

    def wrap(function: Callable[..., Any]) -> Tuned:
        if isinstance(function, TunedFunction):
            raise DeclarationError(
                f"kernel {function.__name__!r}: it is already tuned or a companion; decorate it once"
            )
        name = function.__name__
        where = f"kernel {name!r}"
        _check_name("kernel", name)
        if not isinstance(scope, _kernel.Scope):
            raise DeclarationError(f"{where}: scope must be a tunekit.Scope, not {type(scope).__name__}")
        file = inspect.getsourcefile(function) or place[0]
        if not template or not isinstance(template, str):
            raise DeclarationError(f"{where}: it has no template; give template='mylib/{name}.c.j2'")
        for path in filter(None, (template, reference)):
            _template_path(where, path, Path(file).resolve(), scope.name)
        grid = tuple(rows)
        if not grid:
            raise DeclarationError(f"{where}: it has no rows; give rows=[tunekit.perm(...), ...]")
        for row in grid:
            if not isinstance(row, Row):
                raise DeclarationError(f"{where}: row {row!r} is not a tunekit.perm(...)")
            try:
                for feature in parse(row.requires).unknown():
                    raise DeclarationError(f"requires names {_no_feature(feature)}")
            except DeclarationError as error:
                raise DeclarationError(f"{where}, row {row.suffix!r}: {error}") from None
        check_grid(where, grid)
        for argument in sorted({name for row in grid for name, _ in row.args} | set(defaults or {})):
            if argument in _TEMPLATE_NAMES:
                raise DeclarationError(
                    f"{where}: row argument {argument!r} is a name that every template gets from tunekit; rename it"
                )
        if fixtures is not None and not re.fullmatch(r"[\w.]+:[\w.]+", fixtures):
            raise DeclarationError(f"{where}: fixtures={fixtures!r} is not of the form 'module:attribute'")
        for flag in cflags:
            if flag.startswith(("-m", "-O", "-flto", "-I", "-l", "-L")):
                raise DeclarationError(
                    f"{where}: cflags entry {flag!r}: flags that select instructions come from requires= or targets=, "
                    f"and the level is tunekit's; remove it"
                )
        chain = _split_fallback(where, fallback, grid)
        joined = _join(where, name, companions)
        seats = [item.__name__ for item in joined if item.seat == item.__name__]
        if seats and layout is None:
            raise DeclarationError(
                f"{where}: companion {seats[0]!r} has seat=True, and nothing says which rows read the same operands; "
                f"give layout=, a function of a row, or drop seat=True"
            )
        for item in joined:
            if item.seat and item.seat not in seats:
                known = ", ".join(seats) or "none"
                raise DeclarationError(
                    f"{where}: companion {item.__name__!r} has seat={item.seat!r}, and no companion of this kernel "
                    f"with seat=True has that name (there: {known}); name one of them"
                )
        signature = signature_of(function, where)
        _claim("kernel", f"{scope.name}.{name}", (file, function.__code__.co_firstlineno), _declared)
        for item in joined:
            owner = _companions.setdefault(f"{scope.name}.{item.__name__}", f"{scope.name}.{name}")
            if owner != f"{scope.name}.{name}":
                raise DeclarationError(f"{where}: companion {item.__name__!r} already belongs to {owner}; rename it")
            if f"{scope.name}.{item.__name__}" in _declared:
                raise DeclarationError(
                    f"{where}: companion {item.__name__!r} has the name of a kernel of this scope, and both would be "
                    f"one C symbol; rename it"
                )
        if f"{scope.name}.{name}" in _companions:
            raise DeclarationError(
                f"{where}: a companion of {_companions[f'{scope.name}.{name}']} has this name, and both would be one C "
                f"symbol; rename one"
            )
        optional: dict[str, Any] = {
            "declines": declines,
            "targets": targets,
            "inside": inside,
            "context": context,
            "layout": layout,
        }
        declared = Kernel(
            name=name,
            scope=scope,
            signature=signature,
            template=template,
            reference=reference,
            rows=grid,
            defaults=dict(defaults or {}),
            fallback=chain,
            companions=tuple(Companion(item.__name__, item.signature, item.seat) for item in joined),
            cflags=tuple(cflags),
            fixtures=fixtures,
            module=function.__module__,
            file=str(Path(file).resolve()),
            **{key: value for key, value in optional.items() if value is not None},
        )
        for row in grid:
            _check_targets(where, declared, row)
        tuned = Tuned(function, signature)
        tuned.attach(declared, 0)
        for index, item in enumerate(joined, start=1):
            item.attach(declared, index)
        dispatch.register(declared, (tuned, *joined))
        linking.offer(function.__module__)
        return tuned

    return wrap


def _no_feature(name: str) -> str:
    meant = suggestion(name)
    return (
        f"{name!r}, which is no feature{f' (did you mean {meant!r}?)' if meant else ''}, so the row would run nowhere; "
        f"the features are {', '.join(sorted(KNOWN_FEATURES))}"
    )


def _check_targets(where: str, declared: Kernel, row: Row) -> None:
    for alternative in declared.targets(row):
        for feature in alternative:
            if feature not in KNOWN_FEATURES:
                raise DeclarationError(f"{where}, row {row.suffix!r}: targets names {_no_feature(feature)}")
        for feature in declared.inside(row):
            if feature not in alternative:
                raise DeclarationError(
                    f"{where}, row {row.suffix!r}: inside names {feature!r}, which is not among its targets; "
                    f"add it there, so that the row runs only where it can"
                )
