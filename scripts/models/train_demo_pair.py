"""Train a small target/draft pair of Llama models on a text file and write both as GGUF.

    python scripts/models/train_demo_pair.py TEXT OUT_DIR

TEXT is UTF-8, one document a line; tales.txt becomes tales-target.gguf and tales-draft.gguf in OUT_DIR, and
nothing else is written. About 35 minutes on two cores with bfloat16 instructions, several times that without.
torch and tokenizers are needed here only; they are no dependencies of ggpipe.

1. The target (7.3 M parameters) learns the text. More than 600 steps only memorise 1.5 MB (1,800: loss 0.03).
2. The target writes text of its own, from prefixes of TEXT, greedily and sampled.
3. The draft (0.9 M) is distilled (0.3 x cross-entropy + 0.7 x KL divergence from the target) on 1/4 TEXT and
   3/4 the target's own text, which is what makes the two agree: on 66-91 % of 200 greedy tokens on five
   prompts, against 33-37 % for a draft distilled on TEXT alone from a target that had memorised it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

with contextlib.suppress(ImportError):  # --help works without them; main() says what is missing
    import gguf
    import llama_cpp
    import torch
    import torch.nn.functional as F
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from torch import Tensor

    Source: TypeAlias = tuple[Tensor, int]  # a token stream, and how many windows of it a batch takes

VOCAB_TOKENS = 2048  # at most; a very small text yields fewer
WINDOW_TOKENS = 256  # both models are trained on windows of this length
CONTEXT_TOKENS = 1024  # what the files allow; text grows weaker past the window
BATCH_WINDOWS = 16
VALIDATION_SHARE = 20  # one token in 20, from the end of the text
BOUNDARY = "<|endoftext|>"  # token 0: begins and ends every document
HEAD_WIDTH = 32
NORM_EPSILON = 1e-5
ROPE_BASE = 10000.0


class InputError(ValueError):
    """What the user gave cannot be trained on."""


@dataclass(frozen=True)
class Model:
    """A Llama model: its size, and its parameters under their GGUF names; matrices are (outputs, inputs)."""

    role: str
    vocabulary: int
    width: int
    layers: int
    kv_heads: int
    wide: int  # of the feed-forward networks
    dropout: float
    rate: float  # the highest learning rate
    weights: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        width, wide, kv_width = self.width, self.wide, HEAD_WIDTH * self.kv_heads
        block = {"attn_q": (width, width), "attn_k": (kv_width, width), "attn_v": (kv_width, width)}
        block |= {"ffn_gate": (wide, width), "ffn_up": (wide, width)}
        residual = {"attn_output": (width, width), "ffn_down": (width, wide)}
        matrices = dict.fromkeys(("token_embd", "output"), (self.vocabulary, width))
        norms = ["output_norm"]
        for layer in range(self.layers):
            matrices |= {f"blk.{layer}.{name}": size for name, size in (block | residual).items()}
            norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
        for name, size in matrices.items():
            # as in GPT-2: what adds up over the layers starts smaller
            spread = 0.02 / math.sqrt(2 * self.layers) if name.split(".")[-1] in residual else 0.02
            self.weights[f"{name}.weight"] = (spread * torch.randn(size)).requires_grad_()
        for name in norms:
            self.weights[f"{name}.weight"] = torch.ones(width, requires_grad=True)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on neighbouring pairs, llama.cpp's "norm" kind; x is (..., position, head width)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def logits(model: Model, tokens: Tensor, training: bool = False) -> Tensor:
    """The next token's logits, (batch, position, vocabulary), after each of `tokens`, (batch, position)."""
    weights, dropout = model.weights, model.dropout
    frequencies = ROPE_BASE ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
    angles = torch.outer(torch.arange(tokens.shape[1]), frequencies)
    cos, sin = angles.cos(), angles.sin()

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (model.width,), weights[f"{name}.weight"], NORM_EPSILON)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"])

    def heads(x: Tensor, name: str) -> Tensor:
        return linear(x, name).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)

    x = F.dropout(F.embedding(tokens, weights["token_embd.weight"]), dropout, training)
    for block in (f"blk.{layer}" for layer in range(model.layers)):
        y = norm(x, f"{block}.attn_norm")
        query, key, value = (heads(y, f"{block}.attn_{name}") for name in "qkv")
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        y = linear(y.transpose(1, 2).flatten(-2), f"{block}.attn_output")
        x = x + F.dropout(y, dropout, training)
        y = norm(x, f"{block}.ffn_norm")
        y = F.silu(linear(y, f"{block}.ffn_gate")) * linear(y, f"{block}.ffn_up")
        x = x + F.dropout(linear(y, f"{block}.ffn_down"), dropout, training)
    return linear(norm(x, "output_norm"), "output")


def train_tokenizer(documents: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer that cuts words as GPT-2 does, which llama.cpp knows as "gpt-2"."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes: any text can be tokenized
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS, special_tokens=[BOUNDARY], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def tokenize(tokenizer: Tokenizer, documents: Sequence[str]) -> list[int]:
    """All documents as one stream, boundaries between. Raises InputError where it is too short."""
    stream = [0]
    for encoding in tokenizer.encode_batch(list(documents)):
        stream += [*encoding.ids, 0]
    if len(stream) < (least := (WINDOW_TOKENS + 1) * VALIDATION_SHARE):
        raise InputError(f"the text has {len(stream)} tokens; at least {least} are needed")
    return stream


def next_batch(sources: list[Source]) -> tuple[Tensor, Tensor]:
    """Inputs and the tokens to predict, each (windows, window), from random places of each source."""
    offsets = torch.arange(WINDOW_TOKENS + 1)
    windows = torch.cat([s[torch.randint(len(s) - WINDOW_TOKENS, (n, 1)) + offsets] for s, n in sources])
    return windows[:, :-1], windows[:, 1:]


def validation_loss(model: Model, stream: Tensor) -> float:
    """Cross-entropy in nats a token, over up to 32 evenly spaced windows."""
    windows = stream.unfold(0, WINDOW_TOKENS + 1, max(1, (len(stream) - WINDOW_TOKENS) // 32))[:32]
    with torch.no_grad():
        scores = logits(model, windows[:, :-1]).float()
        return float(F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten()))


def fit(model: Model, sources: list[Source], validation: Tensor, steps: int, teacher: Model | None = None) -> None:
    """Train a model in place; with a teacher, distil it. The rate climbs for 100 steps, falls to a tenth."""
    parameters = list(model.weights.values())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.1)
    can = torch.cpu.get_capabilities()  # without the instructions, bfloat16 is emulated, and far slower
    bfloat16 = any(can.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    began_s = time.monotonic()
    for step in range(steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = model.rate * min(1.0, (step + 1) / 100) * (0.1 + 0.9 * cosine)
        inputs, targets = next_batch(sources)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            scores = logits(model, inputs, training=True).float().flatten(0, 1)
            loss = F.cross_entropy(scores, targets.flatten())
            if teacher is not None:
                with torch.no_grad():
                    wanted = F.log_softmax(logits(teacher, inputs).float().flatten(0, 1), -1)
                proposed = F.log_softmax(scores, -1)
                loss = 0.3 * loss + 0.7 * F.kl_div(proposed, wanted, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            losses = f"loss {loss.item():.3f}, validation {validation_loss(model, validation):.3f}"
            print(f"{model.role} {step + 1}/{steps}: {losses}, {time.monotonic() - began_s:.0f} s", flush=True)


def write_gguf(model: Model, tokenizer: Tokenizer, path: Path) -> None:
    """Write a model as GGUF that llama.cpp loads as architecture "llama": matrices Q8_0, norms F32."""
    bpe = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_block_count(model.layers)
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(model.width)
    writer.add_feed_forward_length(model.wide)
    writer.add_head_count(model.width // HEAD_WIDTH)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    writer.add_rope_dimension_count(HEAD_WIDTH)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
    for name, tensor in model.weights.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor.detach().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def own_text(path: Path, stream: Sequence[int], samples: int, seed: int) -> list[int]:
    """Text that the model in `path` writes from random prefixes of `stream`, up to 500 tokens a sample."""
    dice = random.Random(seed)
    written: list[int] = []
    model = llama_cpp.Llama(str(path), n_ctx=640, seed=seed, flash_attn=True, verbose=False)
    for _ in range(samples):
        start = dice.randrange(len(stream) - 40)
        text = [0, *stream[start : start + dice.choice((4, 8, 16, 24))]]
        temperature = dice.choice((0.0, 0.0, 0.6, 0.9))
        for token in model.generate(list(text), temp=temperature, top_k=40, top_p=0.95, repeat_penalty=1.0):
            text.append(token)
            if token == 0 or len(text) >= 500:
                break
        written += text
    if len(written) <= WINDOW_TOKENS:
        raise InputError(f"the target wrote {len(written)} tokens, less than a window: raise --samples")
    return written


def train_pair(args: argparse.Namespace) -> None:
    """Train both models and write them. Raises InputError, UnicodeError for bad text, and OSError."""
    torch.manual_seed(args.seed)
    lines = args.text.read_text(encoding="utf-8").split("\n")
    documents = [line.strip() for line in lines if line.strip()]
    tokenizer = train_tokenizer(documents)
    stream = tokenize(tokenizer, documents)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    target_path, draft_path = (args.out_dir / f"{args.text.stem}-{role}.gguf" for role in ("target", "draft"))
    vocabulary = tokenizer.get_vocab_size()
    print(f"{len(documents)} documents, {len(stream)} tokens, vocabulary {vocabulary}", flush=True)
    kept_back = len(stream) // VALIDATION_SHARE
    train, validation = torch.tensor(stream).split((len(stream) - kept_back, kept_back))
    target = Model("target", vocabulary, width=256, layers=8, kv_heads=4, wide=768, dropout=0.15, rate=1.8e-3)
    draft = Model("draft", vocabulary, width=128, layers=2, kv_heads=2, wide=384, dropout=0.0, rate=3e-3)
    fit(target, [(train, BATCH_WINDOWS)], validation, args.target_steps)
    write_gguf(target, tokenizer, target_path)
    own = torch.tensor(own_text(target_path, stream, args.samples, args.seed))
    print(f"the target wrote {len(own)} tokens of its own", flush=True)
    sources = [(train, BATCH_WINDOWS // 4), (own, BATCH_WINDOWS - BATCH_WINDOWS // 4)]
    fit(draft, sources, validation, args.draft_steps, teacher=target)
    write_gguf(draft, tokenizer, draft_path)
    print(f"wrote {target_path} and {draft_path}")


def main() -> int:
    """Parse the command line and train; 2 for what the user can mend, with one line on stderr."""
    parser = argparse.ArgumentParser(description="Train a small target/draft pair on a text file, as GGUF.")
    parser.add_argument("text", type=Path, metavar="TEXT", help="UTF-8 text, one document a line")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="where the two GGUF files go")
    for option, default in (("target-steps", 600), ("draft-steps", 2600), ("samples", 520), ("seed", 0)):
        parser.add_argument(f"--{option}", type=int, default=default, metavar="N", help=f"default {default}")
    args = parser.parse_args()
    if min(args.target_steps, args.draft_steps, args.samples) < 1:
        parser.error("--target-steps, --draft-steps and --samples are at least 1")
    needs = {"torch": "torch", "tokenizers": "tokenizers", "gguf": "gguf", "llama_cpp": "llama-cpp-python"}
    missing = [package for module, package in needs.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"train_demo_pair: not installed: try `pip install {' '.join(missing)}`", file=sys.stderr)
        return 2
    try:
        train_pair(args)
    except (InputError, UnicodeError, OSError) as exc:
        print(f"train_demo_pair: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
