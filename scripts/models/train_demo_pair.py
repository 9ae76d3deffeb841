"""Train a small target, two drafts and an EAGLE-3 head for it on a text file, and write them as GGUF.

    python -m scripts.models.train_demo_pair TEXT OUT_DIR

TEXT is UTF-8, one document a line; of tales.txt come tales-target.gguf, tales-draft.gguf, tales-draft-2.gguf and
tales-eagle3.gguf. The stages can be interrupted (Ctrl-C, SIGTERM, --minutes): the same command continues from the
checkpoints in OUT_DIR/work, which are written every two minutes.

1. tokenizer: byte-level BPE, 2,048 tokens, among them ChatML's.
2. target (7.3 M parameters): learns the text, requests for tales in ChatML, and passages to repeat or to edit, on
   windows of 512 tokens, for all its steps: where it stopped at the least validation loss, it could not go on without
   repeating itself. It begins with heads that copy.
3. outputs: the target writes text of its own, greedily and sampled; its 32 best candidates for each token are kept.
4. draft (1.8 M): begins with heads that copy as well, and is distilled on 3/4 the target's own text and 1/4 TEXT.
   Drafts distilled on TEXT alone agree with the target about half as often.
5. second-draft (2.1 M): begins as the first one, and learns with misses of the first weighing most (SpecInfer's
   boost-tuning): the two together name the target's token more often than either.
6. head (EAGLE-3, 1.3 M and the target's embeddings and output): reads the inputs of layers 2, 4 and 6, begins with
   attention that copies, and is distilled as the draft is.
7. report: agreement of drafts and head along greedy outputs after prompts/, and the loss by position.

With --target FILE (and --draft FILE) the later stages are made for finished models of this script, for example
`--stages outputs,second-draft,report --target tales-target.gguf --draft tales-draft.gguf --window 256`.

Needs torch, tokenizers and gguf, which are no dependencies of ggpipe: give them a virtual environment of their own.
torch's builds for CPUs only ("+cpu") are enough; 2.13 was used. With --threads 2 on two cores that have AVX-512, a step
of the target takes 1.1 to 2.8 s, by machine, and with --bfloat16 three quarters of that where the CPU has instructions
for it; all stages take two hours or more. With AVX2, a step takes 5 s, and all stages take a day.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from scripts.models.demo_pair.workspace import STAGES, InputError, Stop, StoppedError, Workspace

STEPS = (("target", 4000), ("draft", 2600), ("second-draft", 1200), ("head", 1000))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the demo models on a text file, as GGUF.")
    parser.add_argument("text", type=Path, metavar="TEXT", help="UTF-8 text, one document a line")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="where the GGUF files go")
    parser.add_argument("--stages", default=",".join(STAGES), metavar="LIST", help="default %(default)s")
    parser.add_argument("--target", type=Path, metavar="FILE", help="a finished target, instead of training one")
    parser.add_argument("--draft", type=Path, metavar="FILE", help="a finished first draft, instead of training one")
    parser.add_argument("--work", type=Path, metavar="DIR", help="checkpoints; default OUT_DIR/work")
    for name, default in STEPS:
        parser.add_argument(f"--{name}-steps", type=int, default=default, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--samples", type=int, default=1024, metavar="N", help="windows of own text; default %(default)s"
    )
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens of a window; default %(default)s")
    parser.add_argument("--minutes", type=float, default=0, metavar="N", help="stop after N minutes; default: never")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default %(default)s")
    parser.add_argument("--bfloat16", action="store_true", help="the target's layers in bfloat16, on CPUs that have it")
    return parser


def train(args: argparse.Namespace) -> None:
    """Carry out the stages. Raises InputError, UnicodeError for bad text, OSError, and StoppedError."""
    import torch

    from scripts.models.demo_pair.pipeline import Order, Training

    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("medium")  # products in bfloat16 where the CPU has instructions for them
    stop = Stop(args.minutes)
    stop.listen()
    names = ("text", "out_dir", "target", "draft", "window", "samples", "seed", "bfloat16")
    steps = {f"{name.replace('-', '_')}_steps" for name, _ in STEPS}
    order = Order(stages=tuple(args.stages.split(",")), **{name: getattr(args, name) for name in (*names, *steps)})
    Training(order, Workspace(args.work or args.out_dir / "work"), stop).run()


def main() -> int:
    """Parse the command line and train; 2 for what the user can mend, with one line on stderr; 3 where it stopped."""
    command = parser()
    args = command.parse_args()
    numbers = ("target_steps", "draft_steps", "second_draft_steps", "head_steps", "samples", "threads")
    if min(getattr(args, name) for name in numbers) < 1 or args.window < 16:
        command.error("steps, --samples and --threads are at least 1, --window at least 16")
    if unknown := set(args.stages.split(",")) - set(STAGES):
        command.error(f"--stages: no stage {min(unknown)!r}; there are {', '.join(STAGES)}")
    missing = [name for name in ("torch", "tokenizers", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"train_demo_pair: not installed: try `pip install {' '.join(missing)}`", file=sys.stderr)
        return 2
    try:
        train(args)
    except StoppedError as stopped:
        print(f"stopped and saved: {stopped}; the same command continues")
        return 3
    except (InputError, UnicodeError, OSError) as exc:
        print(f"train_demo_pair: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
