"""What drafting from a JSON schema gains; run it as `scripts/bench/forced_text`.

text    The valid instances of schemas.jsonl in three layouts, as a model might write them, on the bundled vocabulary:
        which tokens the schema forces, and how many tokens a run would give if there were no other draft tokens. One
        output after the other, so the first ones show a layout that is not known yet.
speed   Tales as JSON, greedy, by the bundled pair inflated to 0.4 B: two target ranks and a draft rank under mpirun,
        one thread each. Drafters take turns; ratios are of one prompt. Outputs may differ where two tokens are about as
        probable, since other runs round otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ggpipe
from ggpipe.config.model import ModelConfig
from ggpipe.llama.bundled import BUNDLED_PAIR, inflated_pair
from ggpipe.llama.forced_text import ByteVocab
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.vocab import Vocab
from ggpipe.text.grammar.check import Constraint, check
from scripts.bench.measuring import middle

SCHEMAS = Path(__file__).with_name("schemas.jsonl")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one line": {},
    "no spaces": {"separators": (",", ":")},
    "indented": {"indent": 2},
}
TALE = json.dumps(
    {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 40},
            "characters": {
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "maxLength": 20},
                        "species": {"enum": ["human", "animal", "giant"]},
                        "age": {"type": "integer", "minimum": 1, "maximum": 99},
                    },
                    "required": ["name", "species", "age"],
                    "additionalProperties": False,
                },
            },
            "moral": {"type": "string", "maxLength": 60},
        },
        "required": ["title", "characters", "moral"],
        "additionalProperties": False,
    }
)
PROMPTS = tuple(f"A tale of {who} as JSON:" for who in ("a king", "two sisters", "the fox", "a tailor", "the miller"))
ITERATIVE = "iterative"
SETTINGS = (ITERATIVE, "grammar", "ngram", "ngram,grammar", "draft,ngram", "draft,ngram,grammar")


def outputs() -> Iterator[tuple[str, Any]]:
    """A grammar and a JSON value that fits it."""
    for line in SCHEMAS.read_text().splitlines():
        case = json.loads(line)
        checked = check(Constraint(json_schema=json.dumps(case["schema"])))
        if checked.lark:
            yield from ((checked.lark, value) for value in case["valid"])


def share(vocab: Vocab, layout: dict[str, Any]) -> tuple[int, int, int, int]:
    """Tokens of all outputs, draft tokens, how many of them are right, and runs."""
    byte_vocab, n_tokens, n_drafted, n_right, n_runs = ByteVocab(vocab), 0, 0, 0, 0
    for lark, value in outputs():
        forced = byte_vocab.text(lark)
        tokens = vocab.inner_tokens(json.dumps(value, ensure_ascii=False, **layout))
        at = 0
        while forced is not None and at < len(tokens):
            drafted = [token for token, _ in forced.after(())]
            n = sum(itertools.takewhile(bool, map(operator.eq, drafted, tokens[at:])))
            n_drafted, n_right, n_runs = n_drafted + len(drafted), n_right + n, n_runs + 1
            for token in tokens[at : at + n + 1]:
                forced.accept(token)
            at += n + 1
        n_tokens += at
    return n_tokens, n_drafted, n_right, n_runs


def measure_text() -> None:
    vocab = Vocab(ModelFile.open(BUNDLED_PAIR.target), ModelConfig(path=BUNDLED_PAIR.target))
    print("| layout | tokens | draft tokens | right | tokens a run |\n|---|---|---|---|---|")
    for name, layout in LAYOUTS.items():
        n_tokens, n_drafted, n_right, n_runs = share(vocab, layout)
        print(f"| {name} | {n_tokens} | {n_drafted} | {n_right} | {n_tokens / n_runs:.2f} |", flush=True)


def measure_speed(n_rounds: int, n_predict: int) -> None:
    pair = inflated_pair()
    ratios: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    n_other = dict.fromkeys(SETTINGS, 0)
    common: dict[str, Any] = {"n_ctx": 2048, "threads": 1, "cache_prompt": False, "temp": 0, "n_predict": n_predict}
    with ggpipe.Engine(pair.target, draft=pair.draft, layer_split="0.5,0.5/1.0", **common) as engine:
        for number in range(n_rounds + 1):
            for prompt in PROMPTS:
                seconds: dict[str, float] = {}
                written: dict[str, str] = {}
                for setting in SETTINGS[number % len(SETTINGS) :] + SETTINGS[: number % len(SETTINGS)]:
                    how = {"mode": ITERATIVE} if setting == ITERATIVE else {"mode": "async", "spec_type": setting}
                    answer = engine.generate(prompt, json_schema=TALE, **how).wait()  # type: ignore[arg-type]
                    written[setting] = answer.text
                    seconds[setting] = sum(answer.stats.itl_s)
                for setting in SETTINGS if number else ():  # the first round learns
                    ratios[setting].append(seconds[ITERATIVE] / seconds[setting])
                    n_other[setting] += written[setting] != written[ITERATIVE]
    print("| drafters | x iterative | outputs that differ |\n|---|---|---|")
    for setting in SETTINGS:
        print(f"| {setting} | {middle(ratios[setting])} | {n_other[setting]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="rounds of five prompts, and one before them (4)")
    parser.add_argument("-n", "--predict", type=int, default=128, help="tokens of each output (128)")
    parser.add_argument("--parts", nargs="+", choices=("text", "speed"), default=("text", "speed"))
    arguments = parser.parse_args()
    if "text" in arguments.parts:
        measure_text()
    if "speed" in arguments.parts:
        measure_speed(arguments.rounds, arguments.predict)


if __name__ == "__main__":
    main()
