"""What a grammar costs one user; run it as `scripts/bench/grammar`.

Two target ranks and a draft rank under mpirun, one thread each: the bundled pair, inflated to 0.4 B, and a random pair
with a vocabulary of 150,000 tokens. Without a grammar; with one that allows the same text, so that draft tokens are as
good; and with those of JSON and of digits, in which a token seldom fits that is drawn first. The ones that change the
text are compared without draft tokens. All take turns, and ratios are of one round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import ggpipe
from ggpipe.llama.bundled import inflated_pair
from scripts.models.make_pair import Shape, make_pair

RANDOM = Shape(n_layer=12, n_layer_draft=1, width=1024, n_head=16, n_head_kv=4, n_ff=2816, n_vocab=150_000)
PROMPT = "Once upon a time there was a king who had three sons."
JSON = '{"type": "array", "items": {"type": "object", "required": ["name", "age", "tags"], "properties": {"name": \
{"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}}}, \
"minItems": 9}'
FORMS: dict[str, dict[str, str]] = {
    "none": {},
    "any text": {"grammar": r"root ::= [^\x00]*"},
    "JSON": {"json_schema": JSON},
    "digits": {"grammar": "root ::= [0-9]+"},
}
MODES = ("iterative", "async")


def measure(target: Path, draft: Path, n_predict: int, n_rounds: int) -> list[str]:
    """Lines of a table: tokens a second, and relative to none."""
    speeds: dict[tuple[str, str], list[float]] = {}
    common = {"n_ctx": 1024, "threads": 1, "temp": 0.8, "ignore_eos": True, "n_predict": n_predict}
    with ggpipe.Engine(target, draft=draft, layer_split="0.5,0.5/1.0", **common) as engine:  # type: ignore[arg-type]
        for n in range(n_rounds + 1):
            for mode in MODES:
                for form, options in FORMS.items():
                    if mode != "iterative" and form not in ("none", "any text"):
                        continue
                    answer = engine.generate(PROMPT, seed=n, mode=mode, **options).wait()  # type: ignore[arg-type]
                    if n and answer.stats.decode_tps is not None:  # the first round learns
                        speeds.setdefault((mode, form), []).append(answer.stats.decode_tps)
    lines = []
    for (mode, form), own in speeds.items():
        ratios = [speed / none for speed, none in zip(own, speeds[mode, "none"], strict=True)]
        lines.append(f"| {mode} | {form} | {statistics.median(own):.1f} | {statistics.median(ratios):.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds, and one before them (5)")
    parser.add_argument("-n", "--predict", type=int, default=96, help="tokens of each text (96)")
    parser.add_argument("--pairs", default="demo,random", help="demo, random or both (both)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for pair in arguments.pairs.split(","):
            if pair == "demo":
                own = inflated_pair()
                target, draft = own.target, own.draft
            else:
                target, draft = Path(folder, "target.gguf"), Path(folder, "draft.gguf")
                make_pair(target, draft, RANDOM, s=0.05)
            print(f"\n{pair}\n\n| mode | grammar | t/s | x none |\n|---|---|---|---|", flush=True)
            print("\n".join(measure(target, draft, arguments.predict, arguments.rounds)), flush=True)


if __name__ == "__main__":
    main()
