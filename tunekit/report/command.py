# SPDX-License-Identifier: Apache-2.0
"""The command: options in, files out."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import tunekit
from tunekit.errors import TunekitError
from tunekit.report import page, picture, sources
from tunekit.report.reading import as_json

DEFAULT = "tunekit-report.html"


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, with the permissions that any new file has.

    Raises:
        TunekitError: it cannot be written; the message names the option.
    """
    try:
        if path.is_dir():
            raise TunekitError(f"{path} is a folder; name a file in it")
        if path.exists() and not path.is_file():
            # A pipe or a device: there is nothing to replace. /dev/stdout may lead to one that has no path.
            path.write_bytes(data)
            return
        target = path.resolve()
        beside = target.with_name(f".{target.name}.{os.getpid()}.new")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(beside)
    except OSError as error:
        raise TunekitError(
            f"{path} cannot be written: {error.strerror or error}; name a file elsewhere with --output or --png"
        ) from error


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Make the report; what it holds as JSON values, and sentences about records that could not be used.

    Raises:
        TunekitError: no record, or a file cannot be written, or ``--png`` without its extra.
    """
    if options.png is not None:
        picture.check()  # before anything is written
    if options.record is not None and options.scope is not None:
        raise TunekitError("--record names the one record to report; leave out --scope")
    found, problems = sources.collect(options.scope, Path(options.record) if options.record else None)
    answer: dict[str, Any] = {
        "output": None,
        "png": None,
        "problems": problems,
        "scopes": [as_json(str(s.path), s.record, s.foreign, s.ceilings) for s in found],
    }
    if options.output is not None:
        text = page.render(found, tunekit.__version__, problems)
        if options.output == "-":
            sys.stdout.write(text)
        else:
            write(Path(options.output), text.encode())
            answer["output"] = str(Path(options.output).absolute())
    if options.png is not None:
        write(Path(options.png), picture.draw(found))
        answer["png"] = str(Path(options.png).absolute())
    return answer, problems
