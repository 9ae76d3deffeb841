"""How ranks find out, before anything is loaded, that they fit together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ggpipe
from ggpipe.config import EngineConfig
from ggpipe.engine import machine
from ggpipe.engine.model_file import ModelFile
from ggpipe.engine.stage import Cut, Progress, Stage
from ggpipe.errors import GgpipeError, LaunchError, ModelError, RankError, UsageError
from ggpipe.transport.base import Transport


def check_ranks(config: EngineConfig, n_ranks: int) -> None:
    """Settings that name ranks against the ranks there are. Raises UsageError, the same one on every rank."""
    pipeline, n_draft = config.pipeline, config.n_draft_ranks
    for flag, values in (("-t", pipeline.threads), ("-tb", pipeline.threads_batch)):
        if len(values) not in (1, n_ranks):
            raise UsageError(
                f"{flag} has {len(values)} values for {n_ranks} ranks: give one for all, or one for each rank"
            )
    if pipeline.shares is not None and len(pipeline.shares) + n_draft != n_ranks:
        n = len(pipeline.shares) + n_draft
        raise LaunchError(
            f"--mpi-layer-split names {n} ranks, but {n_ranks} were started: "
            f"use mpirun -n {n}, or give {n_ranks} shares"
        )


def is_draft(config: EngineConfig, transport: Transport) -> bool:
    """This rank holds nothing but the draft model."""
    return transport.rank >= transport.size - config.n_draft_ranks


def hello(transport: Transport, model_file: ModelFile, draft: bool) -> dict[str, Any]:
    """What a rank says of itself."""
    return {
        "rank": transport.rank,
        "host": transport.host,
        "draft": draft,
        "model": model_file.fingerprint,
        "architecture": model_file.architecture,
        "n_layer": model_file.n_layer,
        "ggpipe": ggpipe.__version__,
        "libllama": machine.libllama_version(),
        "features": sorted(machine.cpu_features()),
    }


def compare(hellos: list[dict[str, Any]]) -> list[str]:
    """Do all ranks hold the same? Returns warnings. Raises ModelError or LaunchError where they cannot work together.

    `hellos`: one for each rank, in order.
    """
    head, warnings = hellos[0], []
    for other in hellos[1:]:
        where = f"rank {other['rank']} ({other['host']})"
        first = next(hello for hello in hellos if hello["draft"] == other["draft"])
        if other["model"] != first["model"]:
            raise ModelError(
                f"{where} has another model than rank {first['rank']} ({first['host']}) under "
                f"{'-md' if other['draft'] else '-m'}: copy it there again"
            )
        for package in ("ggpipe", "libllama"):
            if other[package] != head[package]:
                raise LaunchError(
                    f"{where} runs {package} {other[package]}, rank 0 runs {head[package]}: install the same everywhere"
                )
        if other["features"] != head["features"]:
            differ = sorted(set(other["features"]) ^ set(head["features"]))
            warnings.append(f"{where} uses other CPU features than rank 0 ({', '.join(differ)}): texts may differ")
    return warnings


def check_cuts(cuts: list[Cut], architecture: str) -> None:
    """Does each stage get what it needs? `cuts` in pipeline order. Raises ModelError."""
    for before, after in itertools.pairwise(cuts):
        if after.wanted - before.produced:
            raise ModelError(
                f"'{architecture}' models cannot be cut between ranks (a layer needs more than the layer before it); "
                "run it on one rank (without --mpi-layer-split)"
            )


def threads_of(config: EngineConfig, transport: Transport, draft: bool) -> tuple[int, int]:
    """This rank's threads for single tokens and for batches, of the target or of the draft."""
    own_cores = max(machine.cores() // transport.ranks_on_host, 1)
    single, batch = config.pipeline.threads_of(transport.rank, own_cores)
    if draft and config.draft is not None:
        if config.draft.threads > 0:
            single = batch = config.draft.threads
        if config.draft.threads_batch > 0:
            batch = config.draft.threads_batch
    return single, batch


def look_s(config: EngineConfig) -> tuple[float, float]:
    """How often a rank looks for messages while it computes: seconds, at least and at most.

    With speculation a cancel or a correction may be among them, which are worth an early look.
    """
    return (0.2e-3, 0.4e-3) if config.draft is not None else (1e-3, 10e-3)


def stage_loader(
    config: EngineConfig, transport: Transport, model_file: ModelFile, layers: tuple[int, int], draft: bool
) -> Callable[[Progress], Stage]:
    """A function that makes this rank's stage, of the target or of the draft, given whom to tell its progress."""
    threads = threads_of(config, transport, draft)
    part = config.draft if draft and config.draft is not None else config
    shares_cores = draft and transport.ranks_on_host > config.n_draft_ranks

    def load(progress: Progress) -> Stage:
        if shares_cores:
            machine.yield_to_others()
        return Stage(model_file, layers, part.model, part.context, threads, progress)

    return load


def failure(transport: Transport, error: GgpipeError) -> dict[str, Any]:
    """A rank's error as it is told to the head."""
    return {"rank": transport.rank, "host": transport.host, "message": str(error), "code": error.exit_code}


def as_error(content: dict[str, Any]) -> GgpipeError:
    """The inverse of `failure`, at the head."""
    kind = UsageError if content["code"] == UsageError.exit_code else RankError
    return kind(f"rank {content['rank']} ({content['host']}): {content['message']}")
