"""What a grammar costs one user; run it as `scripts/bench/grammar`.

Two target ranks and a draft rank under mpirun, one thread each: the bundled pair, inflated to 0.4 B, and a random pair
with a vocabulary of 150,000 tokens. Each text with a grammar has a text without one as its neighbour, and they take
turns at being first; ratios are of neighbours, of their seconds a token without the slowest tenth. One grammar allows
any text: both outputs are the same, and draft tokens are as good. (Where a random model writes half a character they
differ; those do not count.) Those of JSON and of digits change the text; they are compared without draft tokens, where
each token costs a run of one row, whatever it is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import ggpipe
from ggpipe.llama.bundled import inflated_pair
from ggpipe.stats.records import RequestStats
from scripts.bench.measuring import middle
from scripts.models.make_pair import Shape, make_pair

RANDOM = Shape(n_layer=12, n_layer_draft=1, width=1024, n_head=16, n_head_kv=4, n_ff=2816, n_vocab=150_000)
PROMPT = "Once upon a time there was a king who had three sons."
JSON = '{"type": "array", "items": {"type": "object", "required": ["name", "age", "tags"], "properties": {"name": \
{"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}}}, \
"minItems": 9}'
FORMS: dict[str, dict[str, str]] = {
    "any text": {"grammar": r"root ::= [^\x00]*"},
    "JSON": {"json_schema": JSON},
    "digits": {"grammar": "root ::= [0-9]+"},
}
CASES = (("iterative", "any text"), ("iterative", "JSON"), ("iterative", "digits"), ("async", "any text"))


@dataclass(frozen=True)
class Texts:
    """Outputs of one case, with a grammar or without."""

    stats: list[RequestStats] = field(default_factory=list)

    @property
    def ms(self) -> str:
        """Milliseconds a token."""
        return f"{statistics.median(map(token_s, self.stats)) * 1e3:.2f}"

    @property
    def drafted(self) -> str:
        """Runs for each token, and how many of the draft tokens were accepted."""
        n_tokens = sum(stats.n_generated for stats in self.stats)
        n_runs = sum(len(stats.runs) for stats in self.stats)
        n_submitted = sum(stats.counters.submitted_tokens for stats in self.stats)
        n_accepted = sum(stats.counters.accepted_tokens for stats in self.stats)
        return f"{n_runs / n_tokens:.2f}, {n_accepted}/{n_submitted}"


def token_s(stats: RequestStats) -> float:
    """Seconds a token of a text, without the slowest tenth: what else runs on a machine shows there."""
    times = sorted(stats.itl_s)
    return statistics.mean(times[: len(times) - len(times) // 10])


def all_s(stats: RequestStats) -> float:
    """Seconds a token of a text."""
    return statistics.mean(stats.itl_s)


def measure(target: Path, draft: Path, n_predict: int, n_rounds: int) -> dict[tuple[str, str], list[float]]:
    """Print a table; returns the ratios of speed, by mode and grammar."""
    common = {"n_ctx": 1024, "threads": 1, "temp": 0.8, "ignore_eos": True, "n_predict": n_predict}
    texts = {case: (Texts(), Texts()) for case in CASES}
    with ggpipe.Engine(target, draft=draft, layer_split="0.5,0.5/1.0", **common) as engine:  # type: ignore[arg-type]
        for n in range(n_rounds + 1):
            for case, both in texts.items():
                mode, form = case
                written: dict[int, ggpipe.Answer] = {}
                for with_grammar in (n % 2, 1 - n % 2):
                    options = FORMS[form] if with_grammar else {}
                    answer = engine.generate(PROMPT, seed=n, mode=mode, **options).wait()  # type: ignore[arg-type]
                    written[with_grammar] = answer
                if n and (form != "any text" or written[0].text == written[1].text):  # the first round learns
                    for with_grammar, answer in written.items():
                        both[with_grammar].stats.append(answer.stats)
    print(
        "| mode | grammar | pairs | ms a token without | with | runs a token, accepted: without | with | x without \
| all tokens |\n|---|---|---|---|---|---|---|---|---|"
    )
    ratios = {}
    for (mode, form), (without, held) in texts.items():
        found, of_all = (
            [seconds(a) / seconds(b) for a, b in zip(without.stats, held.stats, strict=True)]
            for seconds in (token_s, all_s)
        )
        ratios[mode, form] = found
        print(
            f"| {mode} | {form} | {len(held.stats)} | {without.ms} | {held.ms} | {without.drafted} | {held.drafted} | "
            f"{middle(found, 3)} | {middle(of_all, 3)} |"
        )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24, help="rounds, and one before them (24)")
    parser.add_argument("-n", "--predict", type=int, default=24, help="tokens of each text (24)")
    parser.add_argument("--pairs", default="demo,random", help="demo, random or both (both)")
    arguments = parser.parse_args()
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        for pair in arguments.pairs.split(","):
            if pair == "demo":
                own = inflated_pair()
                target, draft = own.target, own.draft
            else:
                target, draft = Path(folder, "target.gguf"), Path(folder, "draft.gguf")
                make_pair(target, draft, RANDOM, s=0.05)
            print(f"\n{pair}\n", flush=True)
            for case, ratio in measure(target, draft, arguments.predict, arguments.rounds).items():
                ratios[pair, *case] = ratio
    worst, ratio = min(ratios.items(), key=lambda item: statistics.median(item[1]))
    print(f"\nworst: {middle(ratio, 3)} ({', '.join(worst)})")


if __name__ == "__main__":
    main()
