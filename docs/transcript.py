# SPDX-License-Identifier: Apache-2.0
"""The transcript in docs/policy.md, made by running the example: this writes it, ``--check`` compares.

It runs on a box of its own: an empty home, as a container has one at its first start.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "policy.md"
BEGIN, END = "<!-- transcript: python docs/transcript.py -->\n", "<!-- end of transcript -->"
# fmt: off
STARTS = (
    ("# the first start on a box",                 ["app.py"]),
    ("# the second, and every later one",          ["app.py"]),
    ("# tune again",                               ["app.py", "--", "--tune"]),
    ("# what a CI machine does on an untuned box", ["TUNEKIT_POLICY=fallback", "TUNEKIT_HOME=/tmp/empty", "app.py"]),
)
# fmt: on


def environment(home: Path) -> dict[str, str]:
    """A home of its own, and nothing of ours or of Python's."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("TUNEKIT_", "PYTHON", "XDG_"))}
    return {**own, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}


def start(words: list[str], home: Path) -> str:
    """What one start says, on both streams in order."""
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    variables = {k: v.replace("/tmp/empty", str(home / "empty")) for k, v in variables.items()}
    done = subprocess.run(
        [sys.executable, *(word for word in words if "=" not in word)],
        env={**environment(home), **variables}, cwd=ROOT / "examples" / "tuned_app", stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


def plain(text: str, home: Path) -> str:
    """Without what differs between machines and runs: paths, the box's name, seconds."""
    from tunekit.cpu import this_box

    text = text.replace(sys.executable, "python").replace(str(ROOT), "~/tunekit").replace(str(home), "~")
    text = text.replace(this_box().key, "BOX")
    return re.sub(r"in \d[\d.]*( min)?( \d+)? s", "in T s", text)


def transcript() -> str:
    """Each command with what it printed."""
    with tempfile.TemporaryDirectory(prefix="tunekit-transcript-") as folder:
        parts = []
        for comment, words in STARTS:
            line = [*(w for w in words if "=" in w), "python", *(w for w in words if "=" not in w)]
            parts.append(f"$ {' '.join(line)}    {comment}\n{plain(start(words, Path(folder)), Path(folder))}")
        return "```text\n" + "\n".join(parts) + "```\n"


def main() -> int:
    """Write the page, or compare it; 1 where it differs."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    new = f"{before}{BEGIN}{transcript()}{END}{after}"
    if check:
        if new != text:
            print(f"{PAGE} is not what the example prints; run: python docs/transcript.py", file=sys.stderr)
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
