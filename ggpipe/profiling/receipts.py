"""Makes a receipt of a benchmark: what was measured, where, and with what."""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.profile import Profile
from ggpipe.cluster.receipt import (
    Receipt,
    ReceiptDrafter,
    ReceiptModel,
    ReceiptNode,
    ReceiptRank,
    ReceiptRun,
    ReceiptSettings,
    ReceiptVersions,
)
from ggpipe.config.context import MAX_PREFIXES, ContextConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit, text_of
from ggpipe.config.model import FIRST_DRAFT, TARGET, ModelConfig
from ggpipe.core.layout import Layout, decimal_split
from ggpipe.engine.doctor.facts import MachineFacts
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import shape_of
from ggpipe.llama.mtp import shape_of_mtp
from ggpipe.profiling.bench import BenchWork
from ggpipe.stats.activity import drafters_of
from ggpipe.stats.records import RankStats, RequestStats
from ggpipe.stats.summary import BenchRun

_SECRET_FLAGS = ("-hft", "--hf-token")
_HASHED_BYTES = 1 << 20
_OUTPUT_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A benchmark of one layout, and what was found out about its machines."""

    config: EngineConfig
    work: BenchWork
    runs: Sequence[BenchRun]
    ranks: Sequence[RankStats]
    """The pipeline's."""
    n_ctx: int
    """Size of the context, in tokens."""
    profile: Profile
    facts: Mapping[str, MachineFacts]
    """Of each host of the profile that has answered."""
    versions: ReceiptVersions
    words: Sequence[str]
    """The command line."""


def receipt_of(measured: Measured, on_hashed: Callable[[int, int], None] = lambda done, total: None) -> Receipt:
    """The receipt of a benchmark with at least one run. `on_hashed`: gets the bytes of models that were hashed, and
    their total."""
    hosts = list(dict.fromkeys(rank.host for rank in measured.profile.ranks))
    names = {host: f"node{number}" for number, host in enumerate(hosts, 1)}
    profile = measured.profile
    return Receipt(
        day=time.strftime("%Y-%m-%d", time.gmtime()),
        note="",
        command=_command(measured.words),
        versions=measured.versions,
        nodes=tuple(_node(names[host], measured.facts.get(host)) for host in hosts),
        models=_models(measured.config, measured.n_ctx, on_hashed),
        settings=_settings(measured),
        ranks=tuple(
            ReceiptRank(
                rank=rank.rank,
                node=names[profile.ranks[rank.rank].host],
                model=rank.model,
                layers=rank.layers,
                threads=rank.threads,
            )
            for rank in measured.ranks
        ),
        runs=tuple(map(_run, measured.runs)),
        profile=replace(profile, ranks=tuple(replace(rank, host=names[rank.host]) for rank in profile.ranks)),
    )


def _command(words: Sequence[str]) -> str:
    """The command line without access tokens and without the name of the home folder."""
    shown, home = [], os.path.expanduser("~").rstrip("/")
    for before, word in zip(("", *words), words, strict=False):
        flag, equals, _ = word.partition("=")
        if before in _SECRET_FLAGS:
            word = "TOKEN"
        elif flag in _SECRET_FLAGS and equals:
            word = f"{flag}=TOKEN"
        elif home and word.startswith(f"{home}/"):
            word = "~" + word.removeprefix(home)
        shown.append(word if word.startswith("~/") else shlex.quote(word))
    return " ".join(("ggpipe", *shown))


def _node(name: str, facts: MachineFacts | None) -> ReceiptNode:
    if facts is None:
        return ReceiptNode(name=name, cpu="", cores=0, numa_nodes=0, cpu_features=())
    return ReceiptNode(
        name=name,
        cpu=facts.cpu,
        cores=facts.cores,
        numa_nodes=facts.numa_nodes,
        cpu_features=facts.cpu_features,
    )


def _models(config: EngineConfig, n_ctx: int, on_hashed: Callable[[int, int], None]) -> tuple[ReceiptModel, ...]:
    files = [ModelFile.open(model.path) for model in (config.model, *(draft.model for draft in config.drafts))]
    paths = list(dict.fromkeys(path for file in files for path in file.paths))
    total, n_done, hashes = sum(path.stat().st_size for path in paths), 0, {}
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_HASHED_BYTES):
                digest.update(block)
                n_done += len(block)
                on_hashed(n_done, total)
        hashes[path] = digest.hexdigest()
    shapes = [_shape(config.model, config.context)]
    for draft in config.drafts:
        own = draft.context
        types = (own.cache_type_k, own.cache_type_v)
        shape = shape_of_mtp(files[0], shapes[0], *types) if draft.is_mtp else _shape(draft.model, own)
        shapes.append(shape)
    return tuple(
        ReceiptModel(
            file=file.paths[0].name,
            size_bytes=sum(path.stat().st_size for path in file.paths),
            fingerprint=file.fingerprint,
            sha256=tuple(hashes[path] for path in file.paths),
            shape=shape,
        )
        for file, shape in zip(files, shapes, strict=True)
    )


def _shape(model: ModelConfig, context: ContextConfig) -> ModelShape:
    types = (context.cache_type_k, context.cache_type_v, context.flash_attn != "off")
    return shape_of(ModelFile.open(model.path), *types, context.n_seq, MAX_PREFIXES, context.n_states)


def _settings(measured: Measured) -> ReceiptSettings:
    config, work = measured.config, measured.work
    context = config.context
    singles = [run.ranks[0].threads[0] for run in measured.runs if run.mode == "single"]
    return ReceiptSettings(
        layer_split=_split_text(config, measured.ranks),
        n_predict=work.n_predict,
        temp=work.sampling.temp,
        seed=work.sampling.seed,
        n_ctx=measured.n_ctx,
        n_batch=context.n_batch,
        n_ubatch=context.n_ubatch,
        cache_type_k=context.cache_type_k,
        cache_type_v=context.cache_type_v,
        flash_attn=context.flash_attn,
        fast_kernels=context.uses_fast_kernels,
        exact=context.exact,
        tensor_split=config.pipeline.tensor_split,
        tensor_wire=config.pipeline.tensor_wire,
        single_threads=singles[0] if singles else None,
        speculation=work.speculation,
    )


def _split_text(config: EngineConfig, ranks: Sequence[RankStats]) -> str:
    """The split that the ranks had, also if ggpipe chose it."""
    splits: list[LayerSplit | None] = []
    for model in range(FIRST_DRAFT + len(config.drafts)):
        own = [rank for rank in ranks if rank.model == model]
        if model != TARGET and own[0].rank == 0:
            splits.append(None)
            continue
        counts: dict[tuple[int, int], int] = {}
        for rank in own:
            counts[rank.layers] = counts.get(rank.layers, 0) + 1
        splits.append(decimal_split(Layout.of_ranks(list(counts), own[0].rank, tuple(counts.values()))))
    while splits[-1] is None:
        splits.pop()
    return text_of(splits)


def _run(run: BenchRun) -> ReceiptRun:
    stats = run.stats
    return ReceiptRun(
        mode=run.mode,  # type: ignore[arg-type]  # it is one of `BenchMode`
        round=run.round,
        prompt=run.prompt,
        n_prompt_tokens=stats.n_prompt,
        n_generated_tokens=stats.n_generated,
        ttft_s=stats.ttft_s or 0.0,
        tokens_per_s=stats.decode_tps or 0.0,
        output=hashlib.sha256(",".join(map(str, run.tokens)).encode()).hexdigest()[:_OUTPUT_DIGITS],
        submitted_tokens=stats.counters.submitted_tokens,
        accepted_tokens=stats.counters.accepted_tokens,
        drafters=_drafters(stats, run.ranks),
    )


def _drafters(stats: RequestStats, ranks: Sequence[RankStats]) -> tuple[ReceiptDrafter, ...]:
    n_models = len({rank.model for rank in ranks if rank.draft})
    return tuple(
        ReceiptDrafter(
            name=own.label,
            model=own.drafter + FIRST_DRAFT if own.drafter < n_models else TARGET,
            judged=own.n_judged,
            right=own.n_right,
            in_output=own.n_output,
        )
        for own in drafters_of(stats, ranks)
    )
