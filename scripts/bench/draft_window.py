"""How often a draft model that sees only the latest tokens is right; run it as `scripts/bench/draft_window`.

The bundled pair writes tales. A line for each `--draft-window`: the agreement, that is, how often the draft model's
best token was the target's, and the number of tokens that were compared. All windows have the same prompts and seeds.
"""

from __future__ import annotations

import argparse

import ggpipe

MODELS = "ggpipe/models/tales-target.gguf", "ggpipe/models/tales-draft.gguf"
WINDOWS = (0, 256, 128, 64)


def measure(window: int, n_tales: int, n_predict: int) -> tuple[int, int]:
    """Number of tokens that were compared, and of those that the draft model named."""
    target, draft = MODELS
    judged = right = 0
    with ggpipe.Engine(
        target, draft=draft, n_ctx=1024, n_requests=1, threads=1, mode="speculative", spec_type="draft", temp=0.8,
        draft_window=window,
    ) as engine:  # fmt: skip
        for seed in range(n_tales):
            answer = engine.generate(
                "Once upon a time there was", n_predict=n_predict, seed=seed, ignore_eos=True
            ).wait()
            n, n_right = answer.stats.counters.by_drafter[0]
            judged, right = judged + n, right + n_right
    return judged, right


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("windows", nargs="*", type=int, default=WINDOWS, help="0: all tokens")
    parser.add_argument("--tales", type=int, default=20)
    parser.add_argument("-n", "--n-predict", type=int, default=480)
    args = parser.parse_args()
    print(f"agreement of the bundled pair, {args.tales} tales of {args.n_predict} tokens")
    print("window  agreement  tokens")
    for window in args.windows:
        judged, right = measure(window, args.tales, args.n_predict)
        print(f"{window or 'all':>6}  {right / judged:9.1%}  {judged:6d}", flush=True)


if __name__ == "__main__":
    main()
