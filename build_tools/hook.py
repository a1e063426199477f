# SPDX-License-Identifier: Apache-2.0
"""The setuptools hook: ``setup(tunekit_modules=["mylib/kernels.py"])``.

Inert in every project that does not use the keyword. The declaring file is executed alone, never through
``import mylib``, whose modules may not be importable yet. Modules are made by tunekit's own compiler driver, so no
flag of the environment reaches a row, and they land in the build folder (or, editable, beside the declaring file).
Without a compiler the install goes on: a report beside the declaring file says why nothing was built.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext as _build_ext

from tunekit import _manifest, core, cpu, dispatch
from tunekit.environment import settings
from tunekit.errors import TunekitError
from tunekit.kernel import Kernel
from tunekit.module import PREFIX
from tunekit.paths import module_suffix

from .build import Report, build_core_into, build_into

_EPOCH = "1735689600"  # 2025-01-01; an archive cannot hold a date before 1980


class FamilyExtension(Extension):
    """Stands in a distribution's extensions for the module of one declaring file."""

    def __init__(self, file: str, package: str, declare: Callable[[], Sequence[Kernel]] | None = None) -> None:
        super().__init__(f"{package}.{PREFIX}module" if package else f"{PREFIX}module", sources=[])
        self.file, self.package = file, package
        self.declare = declare or (lambda: declare_alone(Path(file)))


class CoreExtension(Extension):
    """Stands for ``tunekit._core``."""

    def __init__(self, sources: str) -> None:
        super().__init__("tunekit._core", sources=[])
        self.folder, self.package = sources, "tunekit"


def declare_alone(file: Path) -> tuple[Kernel, ...]:
    """Execute a declaring file by itself and return its kernels. Raises TunekitError with the file's name."""
    name = f"tunekit_build_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise TunekitError(f"tunekit_modules names {file}, which is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except TunekitError as error:
        raise TunekitError(f"{file}: {error}") from error
    except ImportError as error:
        raise TunekitError(
            f"{file}: {error}; what this file imports belongs to the build requirements "
            f"(pyproject.toml, [build-system])"
        ) from error
    found = tuple(k for k in dispatch.kernels() if k.file == str(file.resolve()))
    if not found:
        raise TunekitError(
            f"{file} declares no kernel with @tunekit.tune; remove it from tunekit_modules or declare one"
        )
    return found


class build_ext(_build_ext):
    """``build_ext`` that also makes tunekit's modules."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.tunekit_files: list[tuple[Path, Path]] = []

    def _ours(self, extension: Any) -> bool:
        return isinstance(extension, (FamilyExtension, CoreExtension))

    def build_extension(self, ext: Any) -> None:
        if not self._ours(ext):
            super().build_extension(ext)
            return
        package = Path(*ext.package.split("."))
        folder = Path(self.build_lib) / package
        scratch = Path(self.build_temp) / "tunekit-objects"
        source_folder = Path(self._source_folder(ext.package))
        _clear(folder, ext)
        if settings().build == "reference-only":
            # The archive's dates; a bit-for-bit reproducible build has none of its own.
            os.environ.setdefault("SOURCE_DATE_EPOCH", _EPOCH)
        try:
            if settings().build == "none":
                raise TunekitError("TUNEKIT_BUILD is none: nothing was built")
            made = self._make(ext, folder, scratch)
        except (TunekitError, OSError) as error:
            if "compiler" in settings().strict:
                raise
            _shout(ext, error)
            made = []
            if isinstance(ext, FamilyExtension):
                made = [_leave_report(ext, folder, error)]
        self.tunekit_files += [(path, source_folder / path.name) for path in made]

    def _make(self, ext: Any, folder: Path, scratch: Path) -> list[Path]:
        if isinstance(ext, CoreExtension):
            path = build_core_into(folder, scratch, Path(ext.folder))
            core.adopt(path)
            cpu.forget()
            return [path]
        kind = settings().build
        kernels = ext.declare()
        winners = _winners(kernels) if kind == "standalone" else {}
        report = build_into(kernels, folder, scratch, kind, winners)
        _tell(report)
        made = [report.path] if report.path else []
        if kind in dispatch.FROZEN:
            made.append(_leave_report(ext, folder, winners=winners))
        return made

    def _source_folder(self, package: str) -> str:
        return str(self.get_finalized_command("build_py").get_package_dir(package))

    def copy_extensions_to_source(self) -> None:
        everything = self.extensions
        self.extensions: list[Any] = [e for e in everything if not self._ours(e)]
        try:
            super().copy_extensions_to_source()
        finally:
            self.extensions = everything
        for extension in everything:
            if self._ours(extension):
                _clear(Path(self._source_folder(extension.package)), extension)
        for built, target in self.tunekit_files:
            # A new file each time: a module that is loaded somewhere keeps its own.
            temporary = target.with_name(f".{target.name}.new")
            shutil.copy2(built, temporary)
            temporary.replace(target)

    def get_outputs(self) -> list[str]:
        everything = self.extensions
        self.extensions = [e for e in everything or [] if not self._ours(e)]
        try:
            outputs = list(super().get_outputs())
        finally:
            self.extensions = everything
        return outputs + [str(built) for built, _ in self.tunekit_files]

    def get_output_mapping(self) -> dict[str, str]:
        everything = self.extensions
        self.extensions = [e for e in everything or [] if not self._ours(e)]
        try:
            mapping = dict(super().get_output_mapping())
        finally:
            self.extensions = everything
        if self.inplace:
            mapping.update({str(built): str(target) for built, target in self.tunekit_files})
        return mapping

    def get_source_files(self) -> list[str]:
        return []


def _patterns(ext: Any) -> list[str]:
    if isinstance(ext, CoreExtension):
        return [f"_core{module_suffix()}"]
    return [f"{PREFIX}*{module_suffix()}", f"{PREFIX}*_build.json"]


def _clear(folder: Path, ext: Any) -> None:
    """Remove what an earlier build left: its declarations may be gone."""
    for pattern in _patterns(ext):
        for path in folder.glob(pattern):
            path.unlink()


def _leave_report(
    ext: FamilyExtension, folder: Path, error: Exception | None = None, winners: Mapping[str, str] | None = None
) -> Path:
    """Say beside the declaring file why nothing was built, and that the build is frozen, with the winners it ships."""
    try:
        scope = ext.declare()[0].scope.name
    except TunekitError:
        raise error or RuntimeError(ext.file) from None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{PREFIX}{scope}_build.json"
    report: dict[str, Any] = {}
    if error is not None:
        report["problem"] = f"the install could not build it ({error.args[0] if error.args else error})"
    if settings().build in dispatch.FROZEN:
        report["frozen"] = settings().build
        report["winners"] = dict(winners or {})
    path.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def _winners(kernels: Sequence[Kernel]) -> dict[str, str]:
    """``scope.kernel`` to the row that the manifests of this box name: what a standalone build ships."""
    found = {}
    for kernel in kernels:
        for layer in _manifest.layers(kernel.scope.name):
            if layer.problem:
                print(f"tunekit: {layer.path} is not usable: {layer.problem}", file=sys.stderr, flush=True)
        suffix = _manifest.manifest_get(kernel)
        if suffix is not None and not kernel.knows(suffix):
            print(f"tunekit: {kernel.key}: the manifest names {suffix!r}, which is no row", file=sys.stderr, flush=True)
        elif suffix is not None:
            found[kernel.key] = suffix
        ships = f"ships {found[kernel.key]}" if kernel.key in found else "no manifest entry: ships the fallback chain"
        print(f"tunekit: {kernel.key}: {ships}", flush=True)
    return found


def _shout(ext: Any, error: Exception) -> None:
    bar = "*" * 78
    print(
        f"{bar}\ntunekit: {ext.name} was NOT built: {error}\n"
        f"The package installs and runs on its Python reference, which is correct and slow.\n"
        f"Afterwards, with a compiler: python -m tunekit build\n"
        f"To make this an error: TUNEKIT_STRICT=compiler\n{bar}",
        file=sys.stderr, flush=True,
    )


def _tell(report: Report) -> None:
    for key, rows in report.built.items():
        print(f"tunekit: {key}: built {', '.join(rows)} in {report.seconds:.1f} s with {report.compiler}", flush=True)
        for row, reason in report.dropped.get(key, {}).items():
            print(f"tunekit: {key}: dropped {row}: {reason}", flush=True)


def attach(distribution: Distribution, extensions: Sequence[Extension]) -> None:
    """Add extensions of ours to a distribution and make ``build_ext`` the one that knows them."""
    distribution.ext_modules = [*(distribution.ext_modules or []), *extensions]
    distribution.cmdclass["build_ext"] = build_ext


def tunekit_modules(distribution: Distribution, keyword: str, value: Any) -> None:
    """The ``tunekit_modules`` keyword of ``setup()``: a list of declaring files, such as ``["mylib/kernels.py"]``."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise TunekitError(f"{keyword} must be a list of files such as ['mylib/kernels.py'], not {value!r}")
    extensions = []
    for file in value:
        if not Path(file).is_file():
            raise TunekitError(f"{keyword} names {file!r}, which does not exist")
        extensions.append(FamilyExtension(file, ".".join(Path(file).parent.parts)))
    attach(distribution, extensions)
