"""Compares groups of two to four parts with the whole model, for every architecture; run it as
`scripts/bench/check_groups`.

Each architecture is a small random model (tests/support/architectures.py) in several types. A text's beginning, single
tokens, several rows and, where the model can roll back, branches are decoded by the whole model and by a group, and all
logits are compared. Attention and FFN are split where libllama does so, and latent attention by our own rule. Where
neither can be, where libllama or ggml ends the process, or where logits are wrong, FFN and output alone are. Each such
try is a process of its own.

A line for each architecture: what is split, the largest difference of a logit, in standard deviations of the whole
model's logits, and the first row whose best token differs, with the whole model's gap between the two. In the end, the
lists that ggpipe/llama/group.py has to hold, and whether it does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from support.architectures import ARCHITECTURES, WITH_EXPERTS_TOO, write
from support.devices import divides
from support.group_check import Difference, compare

from ggpipe.llama import group
from ggpipe.llama.gguf import ModelFile
from scripts.models.quantize import quantize

TYPES = ("f32", "q4_0", "q4_k_m", "q8_0")
PARTS = (2, 3, 4)
KINDS = ("attention and FFN", "latent and FFN", "hybrid and FFN", "FFN")
LISTS = ("SPLIT_ATTENTION", "SPLIT_LATENT", "SPLIT_HYBRID", "SPLIT_FFN")
_HYBRID = group.SPLIT_HYBRID
_SCRIPT = (sys.executable, "-m", "scripts.bench.check_groups")
_LIMIT_S = 1200
_DIVIDES_NOTHING = ("hrm_text",)
"""libllama gives each part the whole of it."""
_ALIBI_ELSEWHERE = ("baichuan",)
"""Only FFN and output may be split: with as many layers as the 13 B model has it has ALiBi, with others not."""


@dataclass(frozen=True)
class Try:
    """What came of one kind of split."""

    kind: str
    worst: Difference | None
    """None where no comparison ended."""
    error: str
    """Why the result cannot be used; empty if it can."""


def try_kind(kind: str, architecture: str, models: Sequence[Path]) -> Try:
    """Compare all models with groups, in a child process."""
    child = subprocess.run(
        [*_SCRIPT, "--compare", kind, architecture, *map(str, models)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # debuggers of two threads of a process wait for each other
        timeout=_LIMIT_S,
    )
    found = [Difference(**json.loads(line)) for line in child.stdout.splitlines() if line.startswith("{")]
    worst = max(found, key=lambda each: each.deviation / each.limit, default=None)
    error = ""
    if len(found) < len(models) * len(PARTS):
        error = _reason(child.stderr) or f"exit code {child.returncode}"
    elif wrong := [each for each in found if not each.deviation <= each.limit]:
        error = f"logits differ by {max(each.deviation for each in wrong):.1e}"
    return Try(kind, worst, error)


def _reason(stderr: str) -> str:
    signs = ("ASSERT", "Error:", "unsupported")
    told = [line.strip() for line in stderr.splitlines() if any(sign in line for sign in signs)]
    return told[-1].rpartition("/")[2][:100] if told else ""


def listed(kind: str, architecture: str) -> contextlib.ExitStack:
    """Inside, ggpipe splits models of this architecture in this way."""
    with contextlib.ExitStack() as stack:
        for each, name in zip(KINDS, LISTS, strict=True):
            stack.enter_context(patch.object(group, name, frozenset({architecture} if each == kind else ())))
        return stack.pop_all()


def compare_all(kind: str, architecture: str, models: Sequence[Path]) -> None:
    """In a child process: print what each comparison gives."""
    with listed(kind, architecture):
        for model in models:
            for n_parts in PARTS:
                print(json.dumps(vars(compare(model, n_parts))), flush=True)


def check(name: str, folder: Path, types: Sequence[str]) -> list[Try]:
    """All attempts for an architecture. Either the last one can be used, or none."""
    if name in _DIVIDES_NOTHING:
        return [Try(KINDS[0], None, "each part would compute all")]
    source = folder / f"{name}.gguf"
    write(name, source)
    models = [quantize(source, folder / f"{name}.{each}.gguf", each) if each != "f32" else source for each in types]
    tries: list[Try] = []
    architecture = name.partition("+")[0]
    file = ModelFile.open(source)
    with listed(KINDS[0], architecture):
        has_heads = group.splits_attention(file) and divides(source) and name not in _ALIBI_ELSEWHERE
    with listed(KINDS[1], architecture):
        has_latent = group.splits_latent(file) and any(
            "attn_k_b" in tensor or "attn_output_a" in tensor for tensor in file.tensors
        )
    own = KINDS[2] if architecture in _HYBRID else KINDS[1] if has_latent else KINDS[0] if has_heads else None
    for kind in (own, KINDS[3]) if own else KINDS[3:]:
        tries.append(try_kind(kind, architecture, models))
        if not tries[-1].error:
            break
    for path in {source, *models}:
        path.unlink()
    return tries


def line_of(name: str, tries: Sequence[Try]) -> str:
    """An architecture's line."""
    last = tries[-1]
    if last.error:
        return f"{name:18} refused   {'; '.join(f'{each.kind}: {each.error}' for each in tries)}"
    assert last.worst is not None
    why = f"   ({tries[0].kind}: {tries[0].error})" if len(tries) > 1 else ""
    return f"{name:18} {last.kind:18} {last.worst.deviation:.1e}  {last.worst.tokens}{why}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("names", nargs="*", help="architectures, default all; NAME+experts: with experts")
    parser.add_argument("--types", nargs="+", default=TYPES, help=f"of the weights, default {' '.join(TYPES)}")
    parser.add_argument("--compare", metavar="KIND", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compare:
        compare_all(args.compare, args.names[0], [Path(name) for name in args.names[1:]])
        return 0
    names = args.names or [*ARCHITECTURES, *(f"{name}+experts" for name in WITH_EXPERTS_TOO)]
    useful: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="ggpipe-groups-") as folder:
        for name in names:
            tries = check(name, Path(folder), args.types)
            print(line_of(name, tries), flush=True)
            architecture = name.partition("+")[0]
            kind = "" if tries[-1].error else tries[-1].kind
            # with and without experts: what suits both
            useful[architecture] = min(useful.get(architecture, kind), kind, key=("", *reversed(KINDS)).index)
    right = True
    for kind, name_of_list in zip(KINDS, LISTS, strict=True):
        found = {name for name, each in useful.items() if each == kind}
        print(f"\n{kind}: {' '.join(sorted(found))}")
        known = {name for name in getattr(group, name_of_list) if name in useful}
        if found != known:
            right = False
            print(f"  ggpipe/llama/group.py differs in: {' '.join(sorted(found ^ known))}")
    print(f"\nrefused: {' '.join(sorted(name for name, each in useful.items() if not each))}")
    print("ggpipe/llama/group.py is right" if right else "ggpipe/llama/group.py is wrong")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
