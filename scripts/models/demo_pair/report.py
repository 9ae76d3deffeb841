"""What finished models are worth: agreement along greedy outputs, the loss by position, copied passages."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scripts.models.demo_pair import files
from scripts.models.demo_pair.corpus import BOUNDARY, TURN, TURN_END, replace_noun
from scripts.models.demo_pair.eagle import Head
from scripts.models.demo_pair.llama import CONTEXT_TOKENS, Cache, Model, logits
from scripts.models.demo_pair.outputs import ENDS, choose
from scripts.models.demo_pair.tokens import even_windows

with contextlib.suppress(ImportError):  # --help works without
    import torch
    import torch.nn.functional as F
    from tokenizers import Tokenizer

PROMPTS = Path(__file__).parents[3] / "prompts"
NEW_TOKENS = 200
LONG_TOKENS = 600
BLOCK_TOKENS = 100
_EDIT = re.compile(r"Replace the (\w+) by an? (\w+) in this text: ")

Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The models of a run as their files hold them."""

    target: Model
    tokenizer: Tokenizer
    drafts: dict[str, Model]
    head: Head | None


def read(target: Path, drafts: Sequence[Path], head: Path | None) -> Finished:
    """The models of these files. Raises InputError, OSError."""
    model, tokenizer = files.read_model(target)
    return Finished(
        target=model,
        tokenizer=tokenizer,
        drafts={path.stem: files.read_model(path)[0] for path in drafts},
        head=files.read_head(head) if head else None,
    )


def lines(models: Finished, validation: NDArray[np.int64]) -> Iterator[str]:
    """The report; `validation` is a stream of tokens that no model was trained on."""
    with torch.no_grad():
        yield "target, by position: nats a token on held-back text; share of distinct 4-grams of a sampled output"
        yield from _by_position(models, validation)
        yield f"agreement along {NEW_TOKENS} greedy tokens after each prompt, and distinct 4-grams of these, %"
        columns = [*models.drafts, *(["either"] if len(models.drafts) > 1 else [])]
        columns += ["head 1", "head 2", "head 3"] if models.head else []
        yield f"{'prompt':12}{'tokens':>8}{'distinct':>10}" + "".join(f"{name:>{_width(name)}}" for name in columns)
        for path in sorted(PROMPTS.glob("*.txt")):
            yield from _after(models, path)


def union(hits: Sequence[Bools]) -> Bools:
    """Where any of several drafts is right."""
    right: Bools = np.logical_or.reduce(list(hits))
    return right


def in_a_row(hits: Sequence[Bools]) -> list[float]:
    """Each depth's share of hits among the places where all depths before hit; 0 where there is none."""
    rates, before = [], np.ones_like(hits[0])
    for depth in hits:
        rates.append(float(depth[before].mean()) if before.any() else 0.0)
        before = before & depth
    return rates


def distinct(tokens: Sequence[int]) -> float:
    """The share of distinct 4-grams: little where a text repeats itself."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / max(1, len(grams))


def expected_reply(prompt: str) -> str | None:
    """The passage that a request to repeat or to edit asks for; None for another prompt."""
    request = prompt.split(f"{TURN}user\n")[-1].split(TURN_END)[0]
    if request.startswith("Repeat this tale: "):
        return request.removeprefix("Repeat this tale: ")
    if edit := _EDIT.match(request):
        return replace_noun(request[edit.end() :], edit[1], edit[2])
    return None


def _after(models: Finished, path: Path) -> Iterator[str]:
    """The line of a prompt: how often each draft names the target's token, and how well a passage was copied."""
    text = path.read_text(encoding="utf-8")
    text = text.removesuffix("\n")
    prompt = models.tokenizer.encode(BOUNDARY + text).ids
    written = _write(models.target, prompt, min(NEW_TOKENS, CONTEXT_TOKENS - len(prompt)), 0.0)
    if not written:
        yield f"{path.stem:12}{0:8}"
        return
    tokens = torch.tensor([*prompt, *written])
    wanted = np.array(written)
    columns = {}
    for name, draft in models.drafts.items():
        best = logits(draft, tokens[None, :-1])[0].argmax(-1).numpy()
        columns[name] = best[len(prompt) - 1 :] == wanted
    shares = {name: float(hits.mean()) for name, hits in columns.items()}
    if len(columns) > 1:
        shares["either"] = float(union(list(columns.values())).mean())
    if models.head:
        shares |= dict(zip(("head 1", "head 2", "head 3"), _head_rates(models, tokens, len(prompt)), strict=True))
    begin = f"{path.stem:12}{len(written):8}{100 * distinct(written):10.1f}"
    yield begin + "".join(f"{100 * s:{_width(name)}.1f}" for name, s in shares.items())
    if (expected := expected_reply(text)) is not None:
        reply = models.tokenizer.decode(written)
        ratio = difflib.SequenceMatcher(None, expected, reply, autojunk=False).ratio()
        ended = "ends" if written[-1] in ENDS else "does not end"
        yield f"{'':12}the reply is {100 * ratio:.0f} % like the passage that was asked for, and {ended}"


def _head_rates(models: Finished, tokens: torch.Tensor, prompt_tokens: int) -> list[float]:
    assert models.head is not None
    drafted = models.head.drafts(models.target, tokens[None])
    first = max(0, prompt_tokens - 2)  # the index that names the first token after the prompt
    n = drafted[0].shape[1] - first
    wanted = [tokens[first + 2 + depth : first + 2 + depth + n] for depth in range(len(drafted))]
    n = min(len(tokens) for tokens in wanted)
    return in_a_row(
        [
            (scores[0, first : first + n].argmax(-1) == tokens[:n]).numpy()
            for scores, tokens in zip(drafted, wanted, strict=True)
        ]
    )


def _by_position(models: Finished, validation: NDArray[np.int64]) -> Iterator[str]:
    window = min(LONG_TOKENS, len(validation) - 1)
    windows = torch.from_numpy(even_windows(validation, window, 16))
    scores = torch.cat([logits(models.target, batch[:, :-1]) for batch in windows.split(4)])
    each = F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(len(windows), window)
    prompt = models.tokenizer.encode(BOUNDARY + (PROMPTS / "tale.txt").read_text(encoding="utf-8")).ids
    written = np.array(_write(models.target, prompt, LONG_TOKENS, 0.8, ends=()))
    for start in range(0, window, BLOCK_TOKENS):
        block = written[start : start + BLOCK_TOKENS].tolist()
        loss = float(each[:, start : start + BLOCK_TOKENS].mean())
        yield f"  {start:4} to {start + BLOCK_TOKENS:4}: {loss:.2f}, {distinct(block):.2f}"


def _write(target: Model, prompt: Sequence[int], most: int, heat: float, ends: Sequence[int] = ENDS) -> list[int]:
    """Up to `most` tokens after a prompt, with the end token if it comes."""
    cache = Cache(target.shape, 1, len(prompt) + most)
    noise = torch.Generator().manual_seed(0)
    written: list[int] = []
    for position in range(len(prompt) + most - 1):
        fed = prompt[position] if position < len(prompt) else written[-1]
        scores = logits(target, torch.tensor([[fed]]), cache=cache)[0]
        if position >= len(prompt) - 1:
            written.append(int(choose(scores, torch.tensor([heat]), noise)))
            if written[-1] in ends:
                break
    return written


def _width(name: str) -> int:
    return max(9, len(name) + 2)
