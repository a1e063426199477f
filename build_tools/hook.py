# SPDX-License-Identifier: Apache-2.0
"""The setuptools hook: ``setup(tunekit_modules=["mylib/kernels.py"])``, or the same under ``[tool.tunekit]``.

Inert in every project that does not opt in (:mod:`tunekit._optin` looks). The declaring file is executed alone, never
through ``import mylib``, whose modules may not be importable yet. Modules are made by tunekit's own compiler driver, so
no flag of the environment reaches a row, and they land in the build folder (or, editable, beside the declaring file).
Templates travel by themselves: every ``.j2`` and ``.h`` beside a template is packed. Headers for other packages are
written from the annotations. A fault of the author's (a declaration, a template) stops the build. Without a compiler
the install goes on: a report beside the declaring file says why nothing was built.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext as _build_ext

from tunekit import _manifest, core, cpu, dispatch, linking
from tunekit.environment import settings
from tunekit.errors import DeclarationError, TemplateError, ToolchainError, TunekitError, told
from tunekit.kernel import Kernel
from tunekit.module import PREFIX
from tunekit.paths import module_suffix
from tunekit.rows import split_name

from .build import Report, build_core_into, build_into
from .interface import is_ours, write_interface

_EPOCH = "1735689600"  # 2025-01-01; an archive cannot hold a date before 1980


class FamilyExtension(Extension):
    """Stands in a distribution's extensions for the module of one declaring file.

    ``package`` is None until the distribution's packages are known: they say where a ``src`` folder begins.
    ``headers`` are files of the project that go beside the generated header.
    """

    def __init__(
        self,
        file: str,
        package: str | None = None,
        declare: Callable[[], Sequence[Kernel]] | None = None,
        headers: Sequence[str] = (),
    ) -> None:
        path = Path(file)
        super().__init__(".".join([*path.parent.parts, f"{PREFIX}{path.stem}"]), sources=[])
        self.file, self.package, self.headers = file, package, tuple(headers)
        self._declare = declare
        self._kernels: tuple[Kernel, ...] = ()

    def declare(self) -> tuple[Kernel, ...]:
        """The file's kernels; executed once a build. Raises TunekitError that names the file."""
        if not self._kernels:
            self._kernels = tuple(self._declare()) if self._declare else declare_alone(Path(self.file))
        return self._kernels

    @property
    def unit(self) -> linking.Unit:
        """The declaring module under the name that it is imported by."""
        stem = Path(self.file).stem
        return linking.Unit(f"{self.package}.{stem}" if self.package else stem, self.declare())


class CoreExtension(Extension):
    """Stands for ``tunekit._core``."""

    def __init__(self, sources: str) -> None:
        super().__init__("tunekit._core", sources=[])
        self.folder, self.package = sources, "tunekit"


def declare_alone(file: Path) -> tuple[Kernel, ...]:
    """Execute a declaring file by itself and return its kernels. Raises TunekitError with the file's name."""
    if not file.is_file():
        raise DeclarationError(f"tunekit_modules names {str(file)!r}, which is no file here; correct the path")
    name = f"tunekit_build_{'_'.join(file.with_suffix('').parts)}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise TunekitError(f"tunekit_modules names {file}, which is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except TunekitError as error:
        raise DeclarationError(f"{file}: {error}") from error
    except ImportError as error:
        raise DeclarationError(
            f"{file}: {error}; this file is executed alone, so what it imports belongs to the build requirements "
            f"(pyproject.toml, [build-system] requires), and what it does not need goes into another file"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise DeclarationError(f"{file}: it cannot be executed: {told(error)}") from error
    found = tuple(k for k in dispatch.kernels() if k.file == str(file.resolve()))
    if not found:
        raise DeclarationError(
            f"{file} declares no kernel with @tunekit.tune; remove it from tunekit_modules or declare one"
        )
    return found


def template_files(kernels: Sequence[Kernel]) -> list[Path]:
    """The files that rendering may read: every ``.j2`` and ``.h`` in the folders of the kernels' own templates."""
    folders: dict[Path, None] = {}
    for kernel in kernels:
        folder = Path(kernel.file).parent
        for name in filter(None, (kernel.template, kernel.reference)):
            if not name.startswith("tunekit/"):
                path = next((root / name for root in (folder, folder.parent) if (root / name).is_file()), None)
                if path is not None:
                    folders[path.parent] = None
    return [p for folder in folders for p in sorted(folder.iterdir()) if p.suffix in (".j2", ".h") and p.is_file()]


class build_ext(_build_ext):
    """``build_ext`` that also makes tunekit's modules."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.tunekit_files: list[tuple[Path, Path]] = []
        self._cleared: set[Path] = set()

    def finalize_options(self) -> None:
        super().finalize_options()
        for extension in self.extensions or []:
            if isinstance(extension, FamilyExtension) and extension.package is None:
                extension.package = self._package_of(Path(extension.file))

    def _package_of(self, file: Path) -> str:
        """The package that holds a declaring file."""
        packages = list(self.distribution.packages or [])
        for package in packages:
            if Path(self._source_folder(package)).resolve() == file.resolve().parent:
                return str(package)
        modules = [str(m) for m in self.distribution.py_modules or []]
        root = Path(self._source_folder("") or ".").resolve()
        if file.stem in modules and file.resolve().parent == root:
            return ""
        raise DeclarationError(
            f"tunekit_modules names {str(file)!r}, which lies in none of this project's packages "
            f"({', '.join(packages) or 'it has none'}); list its package in packages="
        )

    def _ours(self, extension: Any) -> bool:
        return isinstance(extension, (FamilyExtension, CoreExtension))

    def build_extension(self, ext: Any) -> None:
        if not self._ours(ext):
            super().build_extension(ext)
            return
        folder = Path(self.build_lib, *filter(None, ext.package.split(".")))
        source_folder = Path(self._source_folder(ext.package) or ".")
        if folder not in self._cleared:  # once: several declaring files may share a folder
            self._cleared.add(folder)
            _clear(folder, ext)
        if settings().build == "reference-only":
            # The archive's dates; a bit-for-bit reproducible build has none of its own.
            os.environ.setdefault("SOURCE_DATE_EPOCH", _EPOCH)
        if isinstance(ext, FamilyExtension):
            self._carry(ext, folder, source_folder)
        try:
            if settings().build == "none":
                raise TunekitError("TUNEKIT_BUILD is none: nothing was built")
            made = self._make(ext, folder, self._objects())
        except (DeclarationError, TemplateError) as error:  # the author's fault, on every box alike
            raise type(error)(f"{ext.file}: {error}") from error
        except (TunekitError, OSError) as error:
            if "compiler" in settings().strict:
                if isinstance(ext, FamilyExtension):
                    print(f"tunekit: while {ext.file} was built:", file=sys.stderr, flush=True)
                raise
            _shout(ext, error)
            made = []
            if isinstance(ext, FamilyExtension):
                made = [_leave_report(ext, folder, error)]
        self.tunekit_files += [(path, source_folder / path.name) for path in made]

    def _objects(self) -> Path:
        """Where objects are kept by content. An editable install has a new temporary folder each time, and so the
        project's own ``build`` folder: what did not change is not compiled again."""
        if self.inplace or self.editable_mode:
            return Path(self.get_finalized_command("build").build_base) / "tunekit-objects"
        return Path(self.build_temp) / "tunekit-objects"

    def _carry(self, ext: FamilyExtension, folder: Path, source_folder: Path) -> None:
        """Headers for other packages; and, into a wheel, the templates that retune and build need on the box."""
        made = write_interface(ext.unit, folder, self.distribution.get_version())
        for name in ext.headers:
            made.append(Path(shutil.copy2(name, folder / linking.FOLDER)))
        self.tunekit_files += [(path, source_folder / path.relative_to(folder)) for path in made]
        if self.inplace or self.editable_mode:
            return
        base = source_folder.resolve()
        for path in template_files(ext.declare()):
            if path.is_relative_to(base):
                target = folder / path.relative_to(base)
            elif path.is_relative_to(base.parent):
                target = folder.parent / path.relative_to(base.parent)
            else:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
            self.tunekit_files.append((target, path))

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
        _tell(ext, report)
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
        kept = {target.resolve() for _, target in self.tunekit_files}
        for extension in everything:
            if self._ours(extension):
                _clear(Path(self._source_folder(extension.package) or "."), extension, kept)
        for built, target in self.tunekit_files:
            if target.suffix == ".pyi" and target.exists() and not is_ours(target):
                continue
            if target.is_file() and target.read_bytes() == built.read_bytes():
                continue  # a module's name says what is in it, so this one is loaded as it is
            # A new file each time: a module that is loaded somewhere keeps its own.
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".new", dir=target.parent)
            os.close(handle)
            shutil.copy2(built, name)
            Path(name).replace(target)

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
        """The sources of an sdist: declaring files and their templates, relative to the project."""
        found = []
        for extension in self.extensions or []:
            if not isinstance(extension, FamilyExtension):
                continue
            found.append(extension.file)
            try:
                paths = template_files(extension.declare())
            except TunekitError:
                continue  # the build says it, with everything that there is to say
            here = Path().resolve()
            found += [str(path.relative_to(here)) for path in paths if path.is_relative_to(here)]
        return found


def _patterns(ext: Any) -> list[str]:
    if isinstance(ext, CoreExtension):
        return [f"_core{module_suffix()}"]
    return [f"{PREFIX}*{module_suffix()}", f"{PREFIX}*_build.json"]


def _clear(folder: Path, ext: Any, kept: Collection[Path] = ()) -> None:
    """Remove what an earlier build left: its declarations may be gone."""
    found = [path for pattern in _patterns(ext) for path in folder.glob(pattern)]
    if isinstance(ext, FamilyExtension):
        found += [path for path in [*folder.glob(f"{linking.FOLDER}/*"), *folder.glob("*.pyi")] if is_ours(path)]
    for path in found:
        if path.resolve() not in kept:
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
    """``scope.kernel`` and ``scope.seat`` to the rows that this box's manifests name: what a standalone build ships."""
    found = {}
    for kernel in kernels:
        for layer in _manifest.layers(kernel.scope.name):
            if layer.problem:
                print(f"tunekit: {layer.path} is not usable: {layer.problem}", file=sys.stderr, flush=True)
        suffix = _manifest.manifest_get(kernel)
        if suffix is not None and not kernel.knows(suffix):
            print(f"tunekit: {kernel.key}: the manifest names {suffix!r}, which is no row", file=sys.stderr, flush=True)
        elif suffix is not None:
            found[kernel.key] = split_name(suffix)[0]  # this build has one compiler
            for seat, name in _manifest.seats_get(kernel).items():
                if kernel.knows(name):  # choosing asks the rest, as it does of the kernel's
                    found[f"{kernel.scope.name}.{seat}"] = split_name(name)[0]
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


def _tell(ext: FamilyExtension, report: Report) -> None:
    """Say what was built and, loudly, what was dropped.

    Raises:
        ToolchainError: a row was dropped and ``TUNEKIT_STRICT`` has ``compiler``.
    """
    for key, rows in report.built.items():
        took = f"{report.compiled} compiled, {report.cached} as they were, in {report.seconds:.1f} s"
        print(f"tunekit: {key}: built {', '.join(rows)} ({took}) with {report.compiler}", flush=True)
    if report.unread:
        why = f"no object was read back for instructions that its row lacks: {report.unread}"
        print(f"tunekit: {why}", file=sys.stderr, flush=True)
    dropped = [
        f"{ext.file}: kernel {key}, row {row}: {why}"
        for key, rows in report.dropped.items()
        for row, why in rows.items()
    ]
    for line in dropped:
        print(f"tunekit: dropped, it does not compile: {line}", file=sys.stderr, flush=True)
    if dropped and "compiler" in settings().strict:
        raise ToolchainError("\n".join(["TUNEKIT_STRICT has compiler, and these rows do not compile:", *dropped]))


def attach(distribution: Distribution, extensions: Sequence[Extension]) -> None:
    """Add extensions of ours to a distribution and make ``build_ext`` the one that knows them.

    Raises:
        DeclarationError: the project has a ``build_ext`` of its own, which is no subclass of ours.
    """
    own = distribution.cmdclass.get("build_ext", build_ext)
    if not issubclass(own, build_ext):
        raise DeclarationError(
            f"tunekit_modules: the project's own build_ext, {own.__module__}.{own.__qualname__}, would not build them; "
            f"derive it from tunekit.build_tools.hook.build_ext"
        )
    distribution.ext_modules = [*(distribution.ext_modules or []), *extensions]
    distribution.cmdclass["build_ext"] = own


def tunekit_modules(distribution: Distribution, keyword: str, value: Any) -> None:
    """The ``tunekit_modules`` keyword of ``setup()``: a list of declaring files, such as ``["mylib/kernels.py"]``.

    Raises:
        DeclarationError: it is no list of files of this project.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise DeclarationError(f"{keyword} must be a list of files such as ['mylib/kernels.py'], not {value!r}")
    there = {e.file for e in distribution.ext_modules or [] if isinstance(e, FamilyExtension)}
    for file in value:
        if not Path(file).is_file() or Path(file).suffix != ".py":
            raise DeclarationError(
                f"{keyword} names {file!r}, which is no Python file of {Path().resolve()}; correct the path"
            )
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise DeclarationError(f"{keyword} names {file!r}; name it relative to the project, and inside it")
    extensions = [FamilyExtension(file) for file in dict.fromkeys(value) if file not in there]
    if extensions:
        attach(distribution, extensions)
