"""The keyword arguments of `Engine` and of its requests.

`scripts/flag_reference` makes this file; do not edit it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

File = str | os.PathLike[str]


class RequestOptions(TypedDict, total=False):
    """Options of a request."""

    n_predict: int
    """Tokens to generate; -1: until the text ends or the context is full. Default: -1."""
    mode: Literal["iterative", "speculative", "async"]
    """async: drafting and verifying overlap (default with `draft`). speculative: draft, verify, repeat. iterative: no
    draft tokens."""
    spec_type: str
    """What drafts, separated by commas: draft, ngram, or none. Several draft for one tree. draft: the draft model.
    ngram: repeats what followed the same tokens before, in this request or another one; needs no model. Default with
    `draft`: draft,ngram."""
    policy: Literal["best-first", "thresholds"]
    """How draft trees grow in async mode. best-first: by the probability of each path, as wide as further rows are
    cheap. thresholds: PipeInfer's, by `p_split`, `p_recovery`, `p_decay` and `n_parallel`, each of which chooses it.
    Default: 'best-first'."""
    n_draft: int
    """Draft tokens in a micro-batch, and in a run, at most. Default: 64 with `policy` best-first, else 8."""
    n_min: int
    """Draft tokens in a micro-batch, at least: smaller ones are not sent. Default: 0."""
    p_accept: float
    """End a branch where the draft's best candidate is less probable than this. Default: 0.0."""
    p_split: float
    """Split a branch where a further candidate is at least this probable. Default: 0.1."""
    p_recovery: float
    """Raise `p_accept` and `p_split` by this for each micro-batch since the last accepted token. Default: 0.0."""
    p_decay: float
    """Lower `p_accept` and `p_split` by this for each attempt since the last accepted token that drafted nothing.
    Default: 0.0."""
    n_parallel: int
    """Branches that are drafted side by side, with `policy` thresholds. Default: 1."""
    n_draft_rows: int
    """Rows in a run of the draft, at most. Default: 16 with `policy` best-first, else as `n_parallel`."""
    n_seq: int
    """Sequence ids for branches in flight, the output's included. Default: 129 with `policy` best-first, where all
    requests share them; else as `n_parallel`. More than `n_parallel` lets new branches go in while older ones are
    verified."""
    cancel: bool
    """Stop runs in flight when all their draft tokens are rejected. Default: True."""
    continuous: bool
    """Keep drafting while earlier draft tokens are verified. Default: True."""
    samplers: str | Sequence[str]
    """Samplers in their order, separated by semicolons or commas; those that are not named are not applied. There are
    adaptive_p and infill as well. Default: the model's own, else
    penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature."""
    sampling_seq: str | Sequence[str]
    """The same in letters, in place of `samplers`: edskypmxt is the default."""
    temp: float
    """Temperature; 0 or less: greedy. Default: the model's own, else 0.8."""
    top_k: int
    """Keep the N most probable tokens; 0: all. Default: the model's own, else 40."""
    top_p: float
    """Keep the most probable tokens that add up to P. Default: the model's own, else 0.95."""
    min_p: float
    """Keep tokens with at least P times the probability of the most probable one. Default: the model's own, else
    0.05."""
    top_n_sigma: float
    """Keep tokens whose logit is within X standard deviations of the best one's; 0 or less: all. Default: -1.0."""
    typical_p: float
    """Keep the most typical tokens that add up to P; 1: all. Default: 1.0."""
    xtc_probability: float
    """How often XTC leaves out the most probable tokens; 0: never. Default: the model's own, else 0."""
    xtc_threshold: float
    """XTC leaves out tokens that are at least so probable, but for the last of them; above 0.5: none. Default: the
    model's own, else 0.1."""
    dynatemp_range: float
    """Dynamic temperature: between `temp` minus and plus X, by the entropy of the candidates; 0: off. Default: 0.0."""
    dynatemp_exponent: float
    """Exponent of the dynamic temperature. Default: 1.0."""
    repeat_last_n: int
    """Tokens that penalties look back on; 0: off, -1: the whole context. Default: the model's own, else 64."""
    repeat_penalty: float
    """Penalise repeated tokens; 1: off. Default: the model's own, else 1."""
    presence_penalty: float
    """Penalise tokens that occurred; 0: off. Default: 0.0."""
    frequency_penalty: float
    """Penalise tokens by how often they occurred; 0: off. Default: 0.0."""
    dry_multiplier: float
    """DRY: penalise tokens that go on with a repetition; 0: off. Default: 0.0."""
    dry_base: float
    """DRY: the penalty grows by this factor with each repeated token. Default: 1.75."""
    dry_allowed_length: int
    """DRY: tokens that may be repeated without penalty. Default: 2."""
    dry_penalty_last_n: int
    """DRY: tokens in which repetitions are searched; 0: off, -1: the whole context. Default: 64."""
    dry_sequence_breakers: str | Sequence[str]
    r"""DRY: a text over which no repetition goes on. May be repeated; none: there is no such text. Default: \n, a
    colon, a double quote and a star."""
    mirostat: int
    """Mirostat 1 or 2, after `temp`, in place of all samplers; 0: off. Default: the model's own, else 0."""
    mirostat_eta: float
    """Learning rate of Mirostat. Default: the model's own, else 0.1."""
    mirostat_tau: float
    """Target entropy of Mirostat. Default: the model's own, else 5."""
    adaptive_target: float
    """Probability near which adaptive_p prefers tokens, where `samplers` names it; below 0: off. Default: -1.0."""
    adaptive_decay: float
    """How slowly adaptive_p adapts to what it has drawn, 0 to 0.99. Default: 0.9."""
    stop: str | Sequence[str]
    """End the text in front of this stop string, where the model writes it. May be repeated."""
    logit_bias: str | Sequence[str]
    """Add a bias to the logit of a token, by its number: 15043+1, or 15043-inf for never. May be repeated."""
    grammar: str
    """Hold the text to a grammar, in GBNF."""
    grammar_file: File
    """Read the grammar from a file."""
    json_schema: str | Mapping[str, Any]
    """Hold the text to a JSON schema; {}: any JSON object."""
    json_schema_file: File
    """Read the JSON schema from a file."""
    reasoning_budget: int
    """Tokens that the model may think before it answers a conversation; behind them the end of its reasoning is
    written. 0: at once, -1: no limit. Default: -1."""
    reasoning_budget_message: str
    """Written in front of that end. Default: ''."""
    seed: int
    """Seed; -1: random. Default: -1."""
    ignore_eos: bool
    """Never end the text before `n_predict` tokens. Default: False."""
    n_probs: int
    """Give each token `probs`: its log-probability, and those of the N most probable tokens; 0: none. Default: 0."""
    post_sampling_probs: bool
    """Give the probabilities that the draw had, not those of the model. Default: False."""


class EngineOptions(RequestOptions, total=False):
    """Options of an engine."""

    load_mode: Literal["auto", "mmap", "none", "mlock", "mmap+mlock", "dio"]
    """How weights are loaded: auto, none, mmap, mlock, mmap+mlock or dio. Default: 'auto'."""
    mmap: bool
    """Map weights from the file, or read this rank's layers into memory. Default: True."""
    mlock: bool
    """Lock weights in RAM. Default: False."""
    repack: bool
    """Let ggml repack weights for this CPU. Default: True."""
    numa: Literal["distribute", "isolate", "numactl"]
    """NUMA strategy: distribute (also without a value), isolate or numactl."""
    override_kv: str | Sequence[str]
    """Override a metadata value of the model. May be repeated."""
    loras: File | Sequence[File]
    """Apply a LoRA adapter. May be repeated."""
    lora_scaled: str | Sequence[str]
    """Apply a LoRA adapter with a scale. May be repeated."""
    prompt_cache: File
    """Keep what is computed of the prompt in a file, and take from it what the prompt begins with. Each rank has its
    own, with its own layers: FILE, FILE.rank1, ..."""
    prompt_cache_all: bool
    """Keep the generated text as well; the file is written at the end. Default: False."""
    prompt_cache_ro: bool
    """Read the prompt cache, and do not write it. Default: False."""
    cache_prompt: bool
    """Keep what ended requests computed, for prompts that begin alike. Default: True."""
    n_ctx: int
    """Context size in tokens; 0: the model's own. Default: 0."""
    warmup: bool
    """Take the memory of all KV cells while loading; else each takes its own when it is used first. Default: False."""
    n_requests: int
    """Requests that are served at the same time; further ones wait. They share the context. Default: 1."""
    n_batch: int
    """Prompt tokens in a batch, at most. Default: 2048."""
    n_ubatch: int
    """Prompt tokens in a run, at most. Several stages get shorter runs, which keep all of them busy. Default: 512."""
    threads: str | int | Sequence[int]
    """Threads; one value, or one for each rank (6,32,20). -1: the machine's cores. Default: '-1'."""
    threads_batch: str | int | Sequence[int]
    """Threads for prompts; one value, or one for each rank. -1: as `threads`. Default: '-1'."""
    flash_attn: Literal["on", "off", "auto"]
    """Flash attention. Default: 'on'."""
    fast_attention: bool
    """Flash attention of ggpipe's own: faster than ggml's, equal but for rounding. Needs AVX2 and f16 KV cells;
    elsewhere, and with `exact`, ggml's. Default: True."""
    cache_type_k: Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
    """KV cache type of K: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0 or q5_1. Default: 'f16'."""
    cache_type_v: Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
    """KV cache type of V, as `cache_type_k`. Default: 'f16'."""
    check_memory: bool
    """Load nothing when a machine's available memory is less than its ranks need. `restart` does so for layers that go
    to other machines. Default: False."""
    exact: bool
    """Reference kernels: the same bits for every split, mode and number of threads. Slower. Default: False."""
    layer_split: str
    """Share of the layers for each rank, head first (0.1,0.4,0.5); SHARE*N: N ranks compute these layers together, as a
    group (0.5*2,0.5*2); draft ranks behind a slash (0.5,0.5/1.0), those of each further draft model behind another.
    Without mpirun, that many ranks are started. auto: planned after a quick measurement. Default: even."""
    tensor_split: str | float | Sequence[float]
    """In which proportions the ranks of a group divide each tensor (3,1): in every group of so many ranks; others
    divide evenly."""
    tensor_wire: Literal["f32", "f16"]
    """What the machines of a group send each other of their sums; f16: half the bytes, rounded. Default: 'f32'."""
    rank_timeout_s: float
    """End the job when a rank sends nothing for so many seconds; 0: never. Default: 30.0."""
    restart: int
    """Start ranks that died again, at most N times in ten minutes: the text goes on where it was. Layers of a machine
    that cannot be reached go to the others. Default: 0."""
    hostfile: File
    """Machines to start ranks on, in mpirun's format. Default: those of the Slurm job, or this one."""
    draft: File | Sequence[File]
    """GGUF file of a draft model: a smaller one of the same family. It runs on the ranks behind the / of `layer_split`,
    else inside the first rank. May be repeated: all of them draft, each on the ranks behind its own /."""
    threads_draft: int
    """Threads of the draft; -1: as `threads`. Default: -1."""
    threads_batch_draft: int
    """Threads of the draft for prompts; -1: as `threads_draft`. Default: -1."""
    rope_scaling: Literal["none", "linear", "yarn"]
    """RoPE scaling: none, linear or yarn. Default: the model's."""
    rope_scale: float
    """Factor that stretches the context; 0: the model's. Default: 0.0."""
    rope_freq_base: float
    """RoPE base frequency; 0: the model's. Default: 0.0."""
    rope_freq_scale: float
    """RoPE frequency scale, 1 / `rope_scale`; 0: the model's. Default: 0.0."""
    yarn_orig_ctx: int
    """Context in tokens that the model was trained with; 0: the model's. Default: 0."""
    yarn_ext_factor: float
    """YaRN extrapolation mix; -1: the model's. Default: -1.0."""
    yarn_attn_factor: float
    """YaRN magnitude scale; -1: the model's. Default: -1.0."""
    yarn_beta_slow: float
    """YaRN high correction dimension; -1: the model's. Default: -1.0."""
    yarn_beta_fast: float
    """YaRN low correction dimension; -1: the model's. Default: -1.0."""
    verbose: bool
    """Show libllama's messages. Default: False."""
