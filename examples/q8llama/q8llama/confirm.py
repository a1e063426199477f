# SPDX-License-Identifier: Apache-2.0
"""What ``python -m tunekit.retune --model FILE`` confirms winners on: this package's own prefill and decode.

tunekit imports this where q8llama is installed and a model is to be run; each arm of a confirmation is a process that
loads the model on the row that is pinned there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from q8llama.model import Model, read_config, read_file
from q8llama.tokens import Tokenizer
from tunekit.measure.fixtures import EVERYTHING, Chain, Part
from tunekit.q8.chains import ANSWER, PROMPT, SEAT


def chain(path: Path) -> Chain:
    """The chain of a model: a prompt of 512 tokens, then 64 tokens one by one.

    Args:
        path: a GGUF file.

    Raises:
        q8llama.ModelError: it is no model that runs here.
        OSError: it cannot be read.
    """
    with read_file(path) as file:
        config = read_config(file, Tokenizer(file.metadata, path).size)
    prompt = min(PROMPT, config.context // 2)
    answer = min(ANSWER, config.context - prompt)
    head = config.vocabulary * config.d

    def prepare() -> Callable[[str], None]:
        import numpy as np

        model = Model.load(path)
        session = model.session(prompt + answer)
        tokens = np.random.default_rng(7).integers(0, config.vocabulary, prompt).astype(np.int32)
        session.feed(tokens)

        def run(part: str) -> None:
            if part == "prefill":
                session.back()
                session.feed(tokens)
            else:
                session.back(prompt)
                for i in range(answer):
                    session.feed([i % config.vocabulary])

        return run

    parts = (
        Part("prefill", float(prompt * config.products() + head)),
        Part("decode", float(answer * (config.products() + head)), (EVERYTHING, SEAT)),
    )
    return Chain(f"{path.name} (q8llama)", parts, prepare)
