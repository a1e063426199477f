# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of a loaded model, and where the time goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from q8llama.model import Model, Session, seconds

PROMPT, ANSWER = 512, 64


def prompt_of(model: Model, count: int) -> Any:
    """Any tokens: no time depends on which."""
    return np.random.default_rng(7).integers(0, model.config.vocabulary, count).astype(np.int32)


def prefill(session: Session, tokens: Any) -> float:
    """Seconds that a prompt takes, from an empty session to the logits after its last token."""
    session.back()
    return seconds(lambda: session.feed(tokens))


def decode(session: Session, count: int) -> float:
    """Seconds that so many tokens take, one by one, from where the session stands."""

    def run() -> None:
        for i in range(count):
            session.feed([i])

    return seconds(run)


def measure(model: Model, rounds: int = 5) -> dict[str, Any]:
    """Best of some rounds: a prompt of 512 tokens, and 64 tokens one by one after it."""
    size = min(PROMPT, model.config.context - ANSWER)
    tokens, session = prompt_of(model, size), model.session(size + ANSWER)
    prefill(session, tokens)
    first, later = [], []
    for _ in range(rounds):
        first.append(prefill(session, tokens))
        session.counts()
        later.append(decode(session, ANSWER))
        counts = session.counts()
    return {
        "model": model.name,
        **model.about(),
        "prompt": size,
        "prefill tokens/s": size / min(first),
        "decode tokens/s": ANSWER / min(later),
        "rendezvous a token": counts["rendezvous"] / ANSWER,
        "rendezvous a layer": (counts["rendezvous"] / ANSWER - 1) / model.config.layers,
        "ops a token": counts["ops"] / ANSWER,
    }


def profile(model: Model) -> dict[str, dict[str, float]]:
    """Milliseconds by stage, of a prompt of 512 tokens and of one token after it."""
    size = min(PROMPT, model.config.context - ANSWER)
    tokens, session = prompt_of(model, size), model.session(size + ANSWER)
    found = {}
    session.settings(profile=True)
    parts: tuple[tuple[str, Callable[[], float], int], ...] = (
        ("prefill", lambda: prefill(session, tokens), 1),
        ("decode", lambda: decode(session, ANSWER // 2), ANSWER // 2),
    )
    for name, call, each in parts:
        best: dict[str, float] = {}
        for _ in range(2 if name == "decode" else 3):
            session.counts()
            call()
            ns = {part: t / 1e6 / each for part, t in session.counts()["ns"].items()}
            if not best or sum(ns.values()) < sum(best.values()):
                best = ns
        found[name] = best
    return found


PRODUCTS = ("qkv", "attention out", "gate and up", "down", "head")


def main(model: Model, profile: bool = False, as_json: bool = False) -> int:
    """Print what was asked for."""
    if profile:
        found: dict[str, Any] = globals()["profile"](model)
        if as_json:
            json.dump(found, sys.stdout, indent=1)
            print()
            return 0
        parts = list(found["prefill"])
        print(f"{'stage':<16}{'prefill ms':>12}{'share':>8}{'decode ms':>12}{'share':>8}")
        sums = {name: sum(found[name].values()) for name in found}
        for part in parts:
            cells = "".join(f"{found[n][part]:>12.3f}{found[n][part] / sums[n]:>8.1%}" for n in ("prefill", "decode"))
            print(f"{part:<16}{cells}")
        rest = {n: 1 - sum(found[n][p] for p in PRODUCTS) / sums[n] for n in found}
        print(f"{'all':<16}{sums['prefill']:>12.3f}{'':>8}{sums['decode']:>12.3f}")
        print(f"not products: {rest['prefill']:.1%} of prefill, {rest['decode']:.1%} of decode (each stage by itself)")
        return 0
    measured = measure(model)
    if as_json:
        json.dump(measured, sys.stdout, indent=1)
        print()
        return 0
    print(f"{measured['model']}: {measured['bytes'] / 1e6:.0f} MB of packed weights, {measured['lanes']} lanes")
    print(f"products: {measured['row']} ({measured['source']})")
    print(f"attention: {measured['attend']}, gates: {measured['swiglu']}")
    print(f"prefill, {measured['prompt']} tokens: {measured['prefill tokens/s']:.1f} tokens/s")
    print(f"decode, {ANSWER} tokens after them: {measured['decode tokens/s']:.1f} tokens/s")
    layer, token, ops = (measured[n] for n in ("rendezvous a layer", "rendezvous a token", "ops a token"))
    print(f"rendezvous: {layer:.0f} a layer, {token:.0f} a token in {ops:.0f} ops")
    return 0
