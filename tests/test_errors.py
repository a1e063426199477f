# SPDX-License-Identifier: Apache-2.0
"""Other people's exceptions in words."""

from __future__ import annotations

import pytest

from tunekit.errors import FamilyError, ToolchainError, in_words, told


class Mute(ValueError):
    def __str__(self) -> str:
        raise SystemExit("no text")


# fmt: off
@pytest.mark.parametrize(("error", "plain", "named"), [
    (ValueError("n: below 1"),                     "n: below 1",                      "ValueError: n: below 1"),
    (FileNotFoundError(2, "none", "x"),            "[Errno 2] none: 'x'",             "FileNotFoundError: [Errno 2] none: 'x'"),
    (FamilyError("it exits"),                      "it exits",                        "FamilyError: it exits"),
    (ToolchainError("no", ("cc", "-v"), 1, "a\nb"), "no command: cc -v status: 1 | a | b", None),
    (KeyError("n"),                                "KeyError: 'n'",                   "KeyError: 'n'"),
    (SystemExit(3),                                "SystemExit: 3",                   "SystemExit: 3"),
    (RuntimeError("two\nlines"),                   "RuntimeError: two lines",         "RuntimeError: two\nlines"),
    (ValueError(),                                 "ValueError",                      "ValueError"),
    (Mute(),                                       "Mute",                            "Mute"),
])
def test_an_exception_in_words(error: BaseException, plain: str, named: str | None) -> None:
    assert in_words(error) == plain
    assert named is None or told(error) == named
# fmt: on


def test_an_interrupt_is_nobodys_words() -> None:
    class Interrupts(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    for words in (told, in_words):
        with pytest.raises(KeyboardInterrupt):
            words(Interrupts())
    assert len(told(RuntimeError("x" * 5000))) < 1100
