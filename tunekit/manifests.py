# SPDX-License-Identifier: Apache-2.0
"""``python -m tunekit manifest``: show the files that count here, compare them, carry them to another box.

An exported document holds one or several scopes' entries with the record of the run that found them, so that the
status of the box that imports it names, field by field, where they came from. Importing merges and loses nothing: what
the file does not name stays, and what does not run here is kept and not used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunekit import _manifest, _status, dispatch
from tunekit.console import Console, results, table
from tunekit.cpu import this_box
from tunekit.errors import MalformedManifest, ManifestError, TunekitError
from tunekit.kernel import Kernel

FORMAT = "tunekit-manifests"
SCHEMA = 1

_TOO_LARGE = 64 * 1024 * 1024


def add_module_option(command: argparse.ArgumentParser) -> None:
    """``--module``, for families that no entry point names."""
    command.add_argument(
        "--module", action="append", default=[], metavar="M", help="a declaring module without an entry point, too"
    )


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The four commands and their options."""
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.set_defaults(run=run)
        action.add_argument("--scope", help="only this scope")
        add_module_option(action)
        return action

    show = add("show", _show, "the manifests that count here, in the order in which they do, and what they say")
    show.add_argument("--json", action="store_true", help="as JSON")
    diff = add(
        "diff", _diff, "what differs between this box's manifest and a file, or the fallback; 1 where anything does"
    )
    diff.add_argument(
        "file", metavar="FILE", nargs="?", help="an exported document or a manifest (- for standard input)"
    )
    diff.add_argument("--json", action="store_true", help="as JSON")
    export = add("export", _export, "the entries of this box with the record of their run, as one JSON document")
    export.add_argument("--output", metavar="FILE", help="write there instead of to standard output")
    load = add("import", _import, "merge an exported document, or a manifest, into this user's manifests")
    load.add_argument("file", metavar="FILE", help="an exported document or a manifest (- for standard input)")
    load.add_argument(
        "--machine", action="store_true", help="into the machine-wide manifests, which lie under every user's"
    )
    load.add_argument("--dry-run", action="store_true", help="say what would change, and write nothing")


def _scopes(name: str | None) -> dict[str, tuple[Kernel, ...]]:
    return {name: dispatch.declare_scope(name)} if name else dispatch.declare_installed()


def _entries(scope: str, kernels: Sequence[Kernel]) -> dict[str, str]:
    """What the manifests together name for a scope's kernels and their seats."""
    named = {kernel.name: _manifest.manifest_get(kernel) for kernel in kernels}
    for kernel in kernels:
        named |= _manifest.seats_get(kernel)
    entries = {key: value for name in named for key, value in _manifest.spelt(name, named[name]).items()}
    return {key: value for key, value in entries.items() if value is not None}


def _record(scope: str, kernels: Sequence[Kernel]) -> dict[str, Any] | None:
    """The record beside the first manifest that names one of the kernels."""
    named = (m for m in _manifest.layers(scope) if any(m.entry(k) is not None for k in kernels))
    return _manifest.read_record(next((m.path for m in named), None))


def _say(text: str) -> None:
    print(text)


# --- show ------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    for scope, kernels in _scopes(options.scope).items():
        for layer in _manifest.layers(scope):
            record = _manifest.read_record(layer.path) or {}
            stale = [line for k in kernels if layer.entry(k) for line in _status.staleness(k, layer.path)]
            found.append(
                {
                    "scope": scope,
                    "layer": layer.origin,
                    "file": str(layer.path),
                    "exists": layer.exists,
                    "problem": layer.problem,
                    "entries": dict(layer.entries),
                    "faults": dict(layer.faults),
                    "tuned": record.get("ended"),
                    "brand": record.get("brand"),
                    "stale": list(dict.fromkeys(stale)),
                }
            )
    if options.json:
        print(json.dumps(found, indent=1, sort_keys=True), file=results(), flush=True)
        return 0
    if not found:
        _say("no manifest counts here: TUNEKIT_MANIFEST is empty")
    for layer_data in found:
        state = layer_data["problem"] or ("" if layer_data["exists"] else "not there")
        _say(f"{layer_data['scope']} ({layer_data['layer']}): {layer_data['file']}" + (f": {state}" if state else ""))
        for name, suffix in layer_data["entries"].items():
            _say(f"  {name}: {suffix}")
        for name, fault in layer_data["faults"].items():
            _say(f"  {name}: not usable: {fault}")
        if layer_data["tuned"]:
            _say(f"  tuned {layer_data['tuned']} on {layer_data['brand'] or 'an unknown processor'}")
        for line in layer_data["stale"]:
            _say(f"  stale: {line}")
    return 0


# --- documents -------------------------------------------------------------------------------------------


def read_document(file: str, scope: str | None) -> dict[str, dict[str, Any]]:
    """Scope to ``{"manifest": {...}, "record": {...} or None}`` of an exported document or a plain manifest.

    Raises:
        MalformedManifest: it cannot be read or is neither; the message says what it is and what mends it.
    """
    try:
        if file == "-":
            data = sys.stdin.buffer.read(_TOO_LARGE + 1)
        elif not Path(file).is_file():  # a pipe would wait for its writer, a folder is no file
            what = "is not a regular file" if Path(file).exists() else "is not there"
            raise MalformedManifest(f"{file} {what}; name an exported document, or - for standard input")
        else:
            with open(file, "rb") as stream:
                data = stream.read(_TOO_LARGE + 1)
    except OSError as error:
        raise MalformedManifest(f"{file} cannot be read: {error.strerror or error}") from error
    if len(data) > _TOO_LARGE:
        raise MalformedManifest(f"{file} is larger than 64 MiB, so it is no document of manifests")
    plain = _manifest.parse_manifest(data)
    if plain.problem:
        raise MalformedManifest(f"{file} is no document of manifests: {plain.problem}")
    document: dict[str, Any] = json.loads(data.decode("utf-8-sig"))
    if document.get("format") != FORMAT:
        name = scope or Path(file).name.partition(".")[0]
        if not scope and not file.endswith(".tune.json"):
            raise MalformedManifest(
                f"{file} does not say whose manifest it is; give --scope, or name it SCOPE.tune.json"
            )
        document = {"schema": SCHEMA, "scopes": {name: {"manifest": document, "record": None}}}
    if document.get("schema") != SCHEMA:
        raise MalformedManifest(
            f"{file} is a document of schema {document.get('schema')!r}; this tunekit reads {SCHEMA}: update tunekit"
        )
    scopes = document.get("scopes")
    if not isinstance(scopes, dict):
        raise MalformedManifest(f"{file} names no scopes; export it again")
    found: dict[str, dict[str, Any]] = {}
    for name, part in scopes.items():
        if scope and name != scope:
            continue
        manifest = part.get("manifest") if isinstance(part, dict) else None
        record = part.get("record") if isinstance(part, dict) else None
        if not isinstance(manifest, dict) or not isinstance(record, dict | None):
            raise MalformedManifest(
                f"{file}, scope {name!r}: it must hold a manifest object and a record object or null"
            )
        found[name] = {"manifest": manifest, "record": record}
    if not found:
        raise MalformedManifest(f"{file} holds nothing of scope {scope!r}; it holds {', '.join(scopes) or 'none'}")
    return found


def _export(options: argparse.Namespace) -> int:
    scopes = {
        scope: {"manifest": _entries(scope, kernels), "record": _record(scope, kernels)}
        for scope, kernels in _scopes(options.scope).items()
    }
    kept = {scope: part for scope, part in scopes.items() if part["manifest"]}
    if not kept:
        Console().complain(
            "tunekit: there is nothing to export: no manifest names a row; run: python -m tunekit.retune"
        )
        return 3
    text = json.dumps(
        {"format": FORMAT, "schema": SCHEMA, "box": this_box().to_json(), "scopes": kept}, indent=1, sort_keys=True
    )
    if not options.output:
        _say(text)
        return 0
    try:
        _manifest.write_atomically(Path(options.output).absolute(), f"{text}\n".encode())
    except OSError as error:
        raise ManifestError(f"cannot write {options.output}: {error.strerror or error}; name another file") from error
    return 0


# --- diff ------------------------------------------------------------------------------------------------


def _diff(options: argparse.Namespace) -> int:
    scopes = _scopes(options.scope)
    other = read_document(options.file, options.scope) if options.file else None
    rows: list[dict[str, str | None]] = []
    for scope, kernels in scopes.items():
        here = _entries(scope, kernels)
        if other is None:
            there: Mapping[str, Any] = {k.name: dispatch.untuned_row(k) for k in kernels}
            here = {**there, **here}
        else:
            there = other.get(scope, {}).get("manifest", {})
        named = [name for kernel in kernels for name in (kernel.name, *kernel.seats)]
        for name in [key for one in named for key in (one, one + _manifest.COMPILER)]:
            # An application's file spells kernels out.
            theirs = there.get(f"{scope}.{name}", there.get(name))
            if here.get(name) != theirs:
                rows.append({"kernel": f"{scope}.{name}", "here": here.get(name), "there": theirs})
    what = options.file or "the fallback"
    if options.json:
        print(json.dumps({"against": what, "differences": rows}, indent=1, sort_keys=True), file=results(), flush=True)
    elif rows:
        cells = [[str(r["kernel"]), str(r["here"] or "-"), str(r["there"] or "-")] for r in rows]
        _say("\n".join(table(["kernel", "here", "there" if options.file else "untuned"], cells)))
    else:
        _say(f"no difference to {what}")
    return 1 if rows else 0


# --- import ----------------------------------------------------------------------------------------------


def _import(options: argparse.Namespace) -> int:
    document = read_document(options.file, options.scope)
    installed = dispatch.installed_scopes()
    for scope in document:
        if scope not in installed:
            # A file name of our making from a name of somebody else's.
            raise TunekitError(
                f"no scope {scope!r} is installed; installed: {', '.join(sorted(installed))}; choose with --scope"
            )
    changed = False
    for scope, part in document.items():
        named = [(k, name) for k in dispatch.declare_scope(scope) for name in (k.name, *k.seats)]
        kernels = {spelt: k for k, name in named for spelt in (name, f"{scope}.{name}")}
        path = _manifest.site_paths(scope)[0] if options.machine else _manifest.write_path(scope)
        old = _manifest.read_manifest(path).entries
        for name, suffix in part["manifest"].items():
            kernel = kernels.get(name)
            if name.endswith(_manifest.COMPILER) and name.removesuffix(_manifest.COMPILER) in kernels:
                note = ""
            elif kernel is None:
                note = "no kernel of this version has that name; kept for one that has"
            elif not isinstance(suffix, str) or not kernel.knows(suffix):
                note = "its grid has no such row here; kept, and the fallback runs"
            else:
                note = dispatch.why_not(kernel).get(suffix, "")
            before = "unchanged" if old.get(name) == suffix else f"was {old[name]}" if name in old else "new"
            changed = changed or old.get(name) != suffix
            _say(f"{scope}.{name}: {suffix} ({before})" + (f": {note}" if note else ""))
        if not options.dry_run:
            _manifest.save(path, part["manifest"], part["record"])
            _say(f"written: {path}")
    if options.dry_run:
        _say("nothing was written (--dry-run)")
    elif changed:
        _say("to build what it names: python -m tunekit build")
    return 0
