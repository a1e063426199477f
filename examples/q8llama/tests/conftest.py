# SPDX-License-Identifier: Apache-2.0
"""The models that the tests run: the real one where its package is installed, and the cut-down one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the cut-down model."""
    import small

    return small.write(tmp_path_factory.mktemp("small") / "small.gguf")


@pytest.fixture(scope="session")
def model() -> Any:
    """SmolLM2-135M-Instruct."""
    from q8llama import Model, ModelError

    try:
        return Model.load()
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the interpreter with words and changed variables."""

    def run(*words: Any, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *map(str, words)], env={**os.environ, **variables}, cwd="/", text=True, capture_output=True, timeout=240, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return run
