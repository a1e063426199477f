# SPDX-License-Identifier: Apache-2.0
"""``python -m tunekit COMMAND``: status, list, retune, report, doctor, build, probe, show, verify, manifest, new,
header, environment.

Results go to stdout, progress and logs to stderr. Exit status: 0 done, 1 a check failed, 2 usage, 3 nothing could
be built (no compiler, no runnable row), 4 (doctor) timing is unreliable, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunekit import (
    _policy,
    _proofs,
    _status,
    _templates,
    core,
    cpu,
    dispatch,
    linking,
    manifests,
    paths,
    team,
)
from tunekit.console import Console, apart, no_empty, plain, results, seconds, table
from tunekit.environment import environment_table, settings
from tunekit.errors import ManifestError, ToolchainError, TunekitError
from tunekit.kernel import Kernel
from tunekit.rows import split_name


def _families(options: argparse.Namespace) -> None:
    """Import the declaring modules of ``--module``."""
    for name in getattr(options, "module", ()):
        dispatch.add_family(name)


def _all_kernels(scope: str | None) -> list[Kernel]:
    if scope:
        return list(dispatch.declare_scope(scope))
    return [kernel for kernels in dispatch.declare_installed().values() for kernel in kernels]


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, sort_keys=True), file=results(), flush=True)


# --- status ----------------------------------------------------------------------------------------------


def _status_command(options: argparse.Namespace) -> int:
    if options.why_not is not None:
        return _why_not(options)
    kernels = _all_kernels(options.scope)
    rows = [_status.status_of(kernel) for kernel in kernels]
    profile = team.profile()
    if options.json:
        team_json = {"lanes": team.lanes(), "box_profile": str(profile.path) if profile.found else None}
        _print_json({"box": cpu.this_box().to_json(), **team_json, "kernels": [row.as_dict() for row in rows]})
        return 0
    box = cpu.this_box()
    print(f"box: {box.key}")
    tuned = sum(row.source == "manifest" for row in rows)
    print(f"{tuned}/{len(rows)} kernels tuned for this box")
    numbers = "dispatch by the defaults (to measure: python -m tunekit probe)"
    if profile.found:
        numbers = f"dispatch by {len(profile.knobs)} numbers of {profile.path}"
    print(f"lanes: {team.lanes()}, {numbers}\n")
    cells = []
    for r in rows:
        cells.append([f"{r.scope}.{r.kernel}", r.suffix, r.source, r.tier, r.reason])
        cells += [[f"{r.scope}.{n}", s["suffix"], s["source"], r.tier, s["reason"]] for n, s in r.seats.items()]
    print("\n".join(table(["kernel", "row", "source", "tier", "why"], cells)))
    for row in rows:
        for field in row.stale:
            print(f"stale: {row.scope}.{row.kernel}: {field}")
    for scope, kind in dict.fromkeys((row.scope, row.frozen) for row in rows if row.frozen):
        print(f"frozen: {scope} is a {kind} build: policy, --tune and retune do nothing here")
    unseated = [f"{r.scope}.{n} follows the row of {r.kernel}: {why}" for r in rows for n, why in r.unseated.items()]
    for note in [*unseated, *_changed_templates(kernels), *_lost_pins()]:
        print(f"note: {note}")
    for file in dict.fromkeys(r.manifest for r in rows if r.manifest):
        exists = Path(file).exists()
        print(f"\nmanifest: {file}{'' if exists else ' (not there yet)'}")
    untuned = dict.fromkeys(row.scope for row in rows if row.source != "manifest" and not row.frozen)
    tuners = {k.scope.name: k.scope.tuner for k in kernels}
    if any(not tuners[scope] for scope in untuned):
        print("to tune this box: python -m tunekit.retune")
    for scope in untuned:
        if tuners[scope]:
            print(f"to tune {scope}: {_policy.command_of(scope)}")
    return 0


def _changed_templates(kernels: Sequence[Kernel]) -> list[str]:
    """A sentence for each template that is no longer what a module in use was made from."""
    found = []
    for kernel in kernels:
        for loaded in dispatch.loaded_modules(kernel):
            mend = "reinstall" if loaded.path.parent == Path(kernel.file).parent else "run python -m tunekit.retune"
            for name, digest in loaded.stamp["kernels"][kernel.key].get("templates", {}).items():
                if _templates.changed(name, Path(kernel.file).parent, digest):
                    found.append(f"template {name} has changed since {loaded.path.name} was made from it; {mend}")
    return list(dict.fromkeys(found))


def _lost_pins() -> list[str]:
    """A sentence for each pin that names no kernel of an installed family."""
    dispatch.declare_installed()
    names = [(k.scope.name, name) for k in dispatch.kernels() for name in (k.name, *k.seats)]
    known = {spelt for scope, name in names for spelt in (name, f"{scope}.{name}")}
    return [f"TUNEKIT_PIN names {name!r}, which is no kernel here" for name, _ in settings().pin if name not in known]


def _why_not(options: argparse.Namespace) -> int:
    if not 1 <= len(options.why_not) <= 2:
        raise TunekitError("--why-not takes KERNEL, or KERNEL and ROW")
    kernel = dispatch.find_kernel(options.why_not[0])
    if len(options.why_not) == 2:
        answers = {options.why_not[1]: _status.explain_row(kernel, options.why_not[1])}
    else:
        answers = _status.explain_all(kernel)
    if options.json:
        _print_json({"kernel": kernel.key, "rows": answers})
    else:
        for suffix, answer in answers.items():
            print(f"{kernel.key} {suffix}: {answer}")
    return 0


def _list_command(options: argparse.Namespace) -> int:
    found = []
    installed = dispatch.installed_scopes()
    for scope, kernels in dispatch.declare_installed().items():
        for kernel in kernels:
            found.append(
                {
                    "scope": scope,
                    "kernel": kernel.name,
                    "module": installed[scope],
                    "rows": len(kernel.rows),
                    "fallback": list(kernel.fallback),
                    "companions": [c.name for c in kernel.companions],
                    "problem": "",
                }
            )
    problems = dispatch.problems()
    if options.json:
        nothing: dict[str, Any] = {"kernel": None, "rows": 0, "fallback": [], "companions": []}
        _print_json(found + [{"scope": p.scope, "module": p.module, "problem": p.text, **nothing} for p in problems])
    else:
        cells = [[str(f["scope"]), str(f["kernel"]), str(f["rows"]), str(f["module"])] for f in found]
        cells += [[p.scope, "cannot be used", "", p.module] for p in problems]
        print("\n".join(table(["scope", "kernel", "rows", "declared in"], cells, "llrl")))
    return 1 if problems else 0


# --- build -----------------------------------------------------------------------------------------------


def _units(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Kernels by declaring module: what one generated module holds."""
    units: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        units.setdefault((kernel.scope.name, kernel.module), []).append(kernel)
    return list(units.values())


def _ensure_core(runner: Any) -> Path | None:
    """Build the core into the cache where the install could not; returns the file when it was built now."""
    if core.core() is not None:
        return None
    from tunekit.build_tools.build import build_core_into

    folder = paths.private_folder(core.cached_folder())
    path: Path = build_core_into(folder, paths.private_folder(paths.objects_folder()), core.SOURCES, runner)
    core.forget()
    cpu.forget()
    dispatch.forget_modules()
    return path


def _build_command(options: argparse.Namespace) -> int:
    """Build what the manifests name, and what the install could not build; races nothing."""
    console = Console(quiet=options.quiet)
    kernels = _all_kernels(options.scope)
    for reason in dict.fromkeys(dispatch.why_frozen(kernel) for kernel in kernels if dispatch.frozen(kernel)):
        console.complain(f"tunekit: {reason}")
    kernels = [kernel for kernel in kernels if not dispatch.frozen(kernel)]
    if not kernels:
        return 0
    from tunekit.build_tools import Runner, build_cached, build_named

    runner = Runner()
    reports: list[dict[str, Any]] = []

    def progress(done: int, total: int, label: str) -> None:
        console.progress(f"compiling {done}/{total}: {label}")

    try:
        made = _ensure_core(runner)
        if made is not None:
            reports.append({"kind": "core", "path": str(made)})
        for unit in _units(kernels):
            has_fat = any(
                m.kind in ("fat", "grid") and m.path.parent == Path(unit[0].file).parent
                for m in dispatch.loaded_modules(unit[0])
            )
            if options.grid or not has_fat:
                kind = "grid" if options.grid else "fat"
                report = build_cached(unit, kind, runner=runner, progress=progress)
                reports.append(_report_dict(report))
            reports += map(_report_dict, build_named(unit, runner, progress))
    except BaseException:
        runner.stop()
        raise
    finally:
        console.clear()
    if options.json:
        _print_json(reports)
        return 0
    for report_data in reports:
        print(f"{report_data['kind']}: {report_data['path']}")
        for key, rows in report_data.get("built", {}).items():
            print(f"  {key}: {', '.join(rows)}")
        if report_data.get("unread"):
            print(f"  not read back for instructions that a row lacks: {report_data['unread']}")
        for key, dropped in report_data.get("dropped", {}).items():
            for suffix, reason in dropped.items():
                print(f"  {key}: dropped {suffix}: {reason}")
    for note in _changed_templates(kernels):
        print(f"note: {note}")
    if not reports:
        print("nothing to build: the install's module is there and no manifest names another row")
    return 0


def _report_dict(report: Any) -> dict[str, Any]:
    return {
        "kind": report.kind,
        "path": str(report.path),
        "built": report.built,
        "dropped": report.dropped,
        "declined": report.declined,
        "compiled": report.compiled,
        "cached": report.cached,
        "seconds": round(report.seconds, 3),
        "compiler": report.compiler,
        "unread": report.unread,
    }


# --- probe -----------------------------------------------------------------------------------------------


def _probe_command(options: argparse.Namespace) -> int:
    """Measure what dispatch costs here, and write the box profile."""
    from tunekit import probe

    if not options.dry_run:
        probe.check_writable()
    started = time.perf_counter()
    minted = probe.probe()
    path = None if options.dry_run else probe.write(minted)
    if options.json:
        _print_json({"knobs": minted.knobs, "measured": minted.measured, "path": str(path) if path else None})
        return 0
    if not options.quiet:
        print("\n".join(probe.report(minted)))
        print(f"\nprobed in {seconds(time.perf_counter() - started)}")
    print(f"box profile: {path or 'not written'}")
    return 0


# --- report ----------------------------------------------------------------------------------------------


def _report_command(options: argparse.Namespace) -> int:
    """Write the last retunes' records as a page."""
    from tunekit.report import command

    if options.output is None and not options.json:
        options.output = command.DEFAULT
    if options.json and options.output == "-":
        raise TunekitError("--json and --output - both want standard output; name a file")
    answer, problems = command.run(options)
    for problem in problems:
        print(f"tunekit: {problem}", file=sys.stderr)
    if options.json:
        _print_json(answer)
        return 0
    for kind in ("output", "png"):
        if answer[kind]:
            print(answer[kind])
    return 0


# --- doctor ----------------------------------------------------------------------------------------------


def _doctor_command(options: argparse.Namespace) -> int:
    """Say what is wrong with this box: 1 where kernels are affected, 4 where timing alone is."""
    from tunekit.doctor import facts, findings

    seen = facts.here()
    found = findings.examine(seen)
    status = findings.status(found)
    if options.json:
        told = {**dataclasses.asdict(seen), "features": sorted(seen.features)}
        _print_json({"status": status, "findings": [vars(finding) for finding in found], "facts": told})
        return status
    print(f"box: {cpu.this_box().key}, {len(seen.allowed)} CPUs, {seen.compiler.label or 'no compiler'}")
    for kind, title in (
        (findings.KERNELS, "Kernels are unavailable, or not the ones that were tuned"),
        (findings.TIMING, "Timing is unreliable"),
        (findings.NOTE, "Good to know"),
    ):
        those = [finding for finding in found if finding.kind == kind]
        if those:
            print(f"\n{title}:")
        for finding in those:
            print(f"- {plain(finding.what)}\n  mend: {plain(finding.mend)}")
    if status == 0:
        print("\nnothing is wrong here")
    return status


# --- show ------------------------------------------------------------------------------------------------


def _show_command(options: argparse.Namespace) -> int:
    kernel = dispatch.find_kernel(options.kernel)
    if dispatch.frozen(kernel):
        raise TunekitError(f"there is no C to show: {dispatch.why_frozen(kernel)}")
    from tunekit.build_tools import Runner, find_toolchain, named, row_assembly, row_source

    if options.assembly:
        runner = Runner()
        _, compiler = split_name(options.row)
        toolchain = named(runner, compiler) if compiler else find_toolchain(runner)
        if options.arch not in (None, toolchain.arch):
            raise TunekitError(
                f"the compiler makes {toolchain.arch}, not {options.arch}; name a cross compiler in CC, or drop --arch"
            )
        print(row_assembly(kernel, options.row, runner, toolchain, options.alternative), end="")
    else:
        arch = options.arch or cpu.this_cpu().arch
        print(row_source(kernel, options.row, arch, options.alternative), end="")
    return 0


# --- verify ----------------------------------------------------------------------------------------------


def _verify_command(options: argparse.Namespace) -> int:
    """Prove rows: 1 where a gate failed, 3 where nothing could be compiled."""
    from tunekit import verify

    kernels = [dispatch.find_kernel(name) for name in options.kernel] or _all_kernels(options.scope)
    for row in options.row:
        if not any(kernel.knows(row) for kernel in kernels):
            raise TunekitError(f"no kernel has a row {row!r}; see: python -m tunekit status --why-not KERNEL")
    compilers = [name for name in options.compilers.split(",") if name]
    if not compilers:
        raise TunekitError("--compilers names none; for example: --compilers gcc,clang")
    for kernel in kernels:
        if dispatch.frozen(kernel):
            raise TunekitError(f"there is nothing to prove: {dispatch.why_frozen(kernel)}")
    both = not options.emission and not options.execution
    console = Console(quiet=options.quiet)
    answer: dict[str, Any] = {}
    executed: list[verify.Executed] = []
    failed = False

    def progress(done: int, total: int, label: str) -> None:
        console.progress(f"{done}/{total}: {label}")

    try:
        if options.emission or both:
            emitted = verify.emission(kernels, options.row, compilers, progress=progress)
            console.clear()
            failed = emitted.failed > 0
            answer["emission"] = emitted.as_dict()
            if not options.json:
                print("\n".join(verify.emission_table(emitted)))
        if options.execution or both:
            executed = verify.execution(kernels, options.row, options.also, options.in_process, progress)
            console.clear()
            failed = failed or any(item.state == "failed" for item in executed)
            answer["execution"] = {"objects": [vars(item) for item in executed]}
            if not options.json:
                print("\n".join(verify.execution_table(executed)))
    finally:
        console.clear()
    if options.json:
        _print_json(answer)
    if executed and not options.in_process:  # else another Python asks, and keeps the answers
        try:
            for kernel in kernels:
                _proofs.save(kernel, [item for item in executed if item.kernel == kernel.key])
        except ManifestError as error:  # the verdicts are printed, and their loss is no verdict
            console.complain(f"tunekit: the status will not show what was proven: {error}")
    return 1 if failed else 0


# --- for authors and consumers ---------------------------------------------------------------------------


def _new_command(options: argparse.Namespace) -> int:
    from tunekit import _new

    made = _new.write_package(options.name, Path(options.to))
    root = made[0].parent
    print("\n".join(str(path) for path in made))
    print(
        f"\nnext:\n  cd {root}\n  pip install --no-build-isolation -e .\n"
        f"  python -m tunekit.retune --scope {options.name}\n  python -m pytest",
        file=sys.stderr,
    )
    return 0


def _header_command(options: argparse.Namespace) -> int:
    """Where a family's headers lie, or write them."""
    if options.where:
        print(linking.get_include(options.scope))
        return 0
    from tunekit.build_tools.interface import write_interface

    kernels = dispatch.declare_scope(options.scope)
    for module in dict.fromkeys(kernel.module for kernel in kernels):
        for path in write_interface(linking.unit_of(module), Path(options.to)):
            print(path)
    return 0


def _environment_command(options: argparse.Namespace) -> int:
    del options
    print(environment_table(), end="")
    return 0


# --- the parser ------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line, as argparse sees it."""
    top = argparse.ArgumentParser(
        prog="python -m tunekit",
        allow_abbrev=False,
        description="Tuned native kernel families: what runs here, why, and how to build and tune it.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        return command

    status = add("status", _status_command, "one line per tuned kernel: what runs, from where, and why")
    status.add_argument("--scope", help="only this scope's kernels")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.add_argument(
        "--why-not", nargs="+", metavar=("KERNEL", "ROW"), help="why a row (or each row) is or is not chosen"
    )

    listing = add("list", _list_command, "the installed families")
    listing.add_argument("--json", action="store_true", help="as JSON")

    build = add("build", _build_command, "build what the manifests name and what the install could not; races nothing")
    build.add_argument("--scope", help="only this scope")
    build.add_argument("--grid", action="store_true", help="build the whole grid too")
    build.add_argument("--json", action="store_true", help="as JSON")
    build.add_argument("--quiet", action="store_true", help="no progress")

    probe = add("probe", _probe_command, "measure what dispatch costs on this box, and write its profile")
    probe.add_argument("--dry-run", action="store_true", help="measure and report, write nothing")
    probe.add_argument("--json", action="store_true", help="as JSON")
    probe.add_argument("--quiet", action="store_true", help="only where the profile is")

    report = add("report", _report_command, "what the last retune measured, as one page for a browser")
    report.add_argument("--scope", help="only this scope (default: every installed one that has a record)")
    report.add_argument("--record", metavar="FILE", help="this record instead, such as another box's")
    report.add_argument("--output", metavar="FILE", help="the page (tunekit-report.html; - for standard output)")
    report.add_argument(
        "--png", metavar="FILE", help="a picture of the first race, too; needs: pip install 'tunekit-native[report]'"
    )
    report.add_argument(
        "--json", action="store_true", help="print the figures as JSON; then a page is written only with --output"
    )

    doctor = add("doctor", _doctor_command, "what here makes timing unreliable or kernels unavailable, with mends")
    doctor.add_argument("--json", action="store_true", help="findings and facts as JSON")

    show = add("show", _show_command, "the rendered C, or the assembly, of one row")
    show.add_argument("kernel", metavar="KERNEL")
    show.add_argument("row", metavar="ROW", help="a row's name, or reference")
    show.add_argument(
        "--assembly", action="store_true", help="what this box's compiler makes of it, with the shipped flags"
    )
    show.add_argument(
        "--alternative", type=int, default=0, metavar="I", help="which of the row's alternatives (default 0)"
    )
    show.add_argument("--arch", choices=("x86_64", "aarch64"), help="render for this architecture (default: this one)")

    verify = add("verify", _verify_command, "prove rows: what compilers made of them, and that they compute exactly")
    verify.add_argument("--emission", action="store_true", help="compile each row and count its instructions")
    verify.add_argument("--execution", action="store_true", help="run the gates of each row that can run here")
    verify.add_argument("--scope", help="only this scope's kernels")
    verify.add_argument("--kernel", action="append", default=[], metavar="K", help="only this kernel (may be repeated)")
    verify.add_argument("--row", action="append", default=[], metavar="R", help="only this row (may be repeated)")
    verify.add_argument(
        "--compilers", default="gcc,clang", metavar="LIST", help="compilers to ask, with commas (default: gcc,clang)"
    )
    verify.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="COMMAND",
        help="another Python that has this package, such as one of another architecture under an emulator",
    )
    verify.add_argument("--in-process", action="store_true", help="run gates in this process, where no child can start")
    verify.add_argument("--json", action="store_true", help="as JSON")
    verify.add_argument("--quiet", action="store_true", help="no progress")

    manifests.add_arguments(
        commands.add_parser(
            "manifest", help="show, compare, export and import the manifests of this box", allow_abbrev=False
        )
    )
    new = add("new", _new_command, "write a package with one tuned kernel, to start from")
    new.add_argument("name", metavar="NAME", help="of the package: lower-case letters, digits and underscores")
    new.add_argument("--to", default=".", metavar="FOLDER", help="where its folder goes (default: here)")

    header = add("header", _header_command, "where the C headers of a family lie, or write them elsewhere")
    header.add_argument("scope", metavar="SCOPE", help="an installed scope, or the name of its declaring module")
    either = header.add_mutually_exclusive_group(required=True)
    either.add_argument("--where", action="store_true", help="print the folder (for a compiler's -I)")
    either.add_argument("--to", metavar="FOLDER", help="write header, .pxd, .pc and .pyi below this folder")

    for command in (status, build, show, verify, header, report, doctor):
        manifests.add_module_option(command)
    add("environment", _environment_command, "the environment variables that tunekit reads")
    commands.add_parser("retune", help="find this box's winners (python -m tunekit.retune)", add_help=False)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["retune"]:
        from tunekit import retune

        return retune.main(words[1:])
    grammar = parser()
    options = grammar.parse_args(words)
    no_empty(grammar, options)
    if dispatch.shadowed() and options.command in ("build", "show", "verify", "header", "new"):
        print(
            "tunekit: this is a checkout that is not installed, so its build tools are not in the package; "
            "run: pip install -e .  (or start from another folder to use the installed tunekit)",
            file=sys.stderr,
        )
        return 2
    try:
        with apart(getattr(options, "json", False)):
            _families(options)
            status = int(options.run(options))
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except ToolchainError as error:
        print(f"tunekit: {error}", file=sys.stderr)
        return 3
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "cffi", "setuptools"):
            raise
        print(f"tunekit: building needs {error.name}, which is missing: pip install {error.name}", file=sys.stderr)
        return 3
    except TunekitError as error:
        print(f"tunekit: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has gone (| head): not an error of ours; keep the interpreter from flushing into the void.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # standard output is a full disk
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"tunekit: the result cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tunekit: interrupted; nothing was changed", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
