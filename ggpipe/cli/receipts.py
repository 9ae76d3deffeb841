"""Receipts of `ggpipe bench`: its machines are measured before the benchmark, and the file is written after it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ggpipe.channel.client import EngineClient
from ggpipe.cli.messages import warn
from ggpipe.cli.ranks import run_profile
from ggpipe.cli.version import commit
from ggpipe.cluster.profile import Profile
from ggpipe.cluster.receipt import Receipt, ReceiptVersions, as_text
from ggpipe.config.engine import EngineConfig
from ggpipe.display.files import check_writable, write_text
from ggpipe.display.live.terminal import Terminal
from ggpipe.display.progress import FileProgress
from ggpipe.engine.doctor.checkup import facts_of
from ggpipe.engine.doctor.facts import MachineFacts
from ggpipe.errors import IndivisibleModelError, SettingError
from ggpipe.launch.environment import is_rank
from ggpipe.launch.job import slots_of
from ggpipe.launch.rank_setup import ProfileWork, RankSetup
from ggpipe.llama.gguf import ModelFile
from ggpipe.options.option import Options
from ggpipe.options.settings import BenchSettings, LogSettings, RankSettings
from ggpipe.planning.n_ranks import ranks_to_start
from ggpipe.profiling.bench import BenchWork
from ggpipe.profiling.receipts import Measured, receipt_of
from ggpipe.stats.summary import BenchRun

_HERE = "localhost"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a receipt says about the machines, apart from the benchmark."""

    profile: Profile
    facts: dict[str, MachineFacts]
    """Of each host of the profile that has answered."""
    versions: ReceiptVersions


def check_receipt(settings: BenchSettings) -> None:
    """Raises UsageError if there can be no receipt of this benchmark, before anything is started."""
    if settings.receipt is None:
        return
    if len(settings.layouts) > 1:
        raise SettingError("receipt", "describes one layout", "name a single layer split")
    if is_rank():
        raise SettingError("receipt", "measures ranks that ggpipe must start itself", "do not use mpirun or srun")
    check_writable(settings.receipt)


def measure_surroundings(config: EngineConfig, options: Options) -> Surroundings:
    """Profile the machines with as many ranks as the benchmark will have, and ask each machine what it is."""
    hostfile = options[RankSettings].hostfile
    slots = slots_of(hostfile) or [_HERE]
    n_ranks = ranks_to_start(config, hostfile) or 1
    answers = facts_of([*slots, _HERE], config.pipeline.launch_timeout_s)
    profile = _profile(config, options, n_ranks, hostfile)
    facts = {}
    for rank in profile.ranks:
        if (own := answers.get(slots[rank.rank % len(slots)])) is not None:
            facts[rank.host] = own
    for host in dict.fromkeys(rank.host for rank in profile.ranks):
        if host not in facts:
            warn(f"{host} does not say what it is; the receipt will lack its CPU")
    here = answers.get(_HERE)
    return Surroundings(profile=profile, facts=facts, versions=_versions(here))


def _profile(config: EngineConfig, options: Options, n_ranks: int, hostfile: Path | None) -> Profile:
    """The ranks of a profile hold no layers of their own."""
    bare = replace(
        config,
        pipeline=replace(config.pipeline, layer_split=None, auto=False, tensor_split=()),
        drafts=tuple(replace(draft, layer_split=None) for draft in config.drafts),
    )

    def measured(layers: tuple[int, int] | None) -> Profile:
        work = ProfileWork(layers, options[BenchSettings].profile_seconds)
        setup = RankSetup(config=bare, verbose=options[LogSettings].verbose, profile=work)
        profile = run_profile(setup, n_ranks, hostfile)
        assert profile is not None  # this process is not one of the user's own ranks
        return profile

    try:
        return measured(None)
    except IndivisibleModelError:
        if n_ranks > 1:
            raise
        return measured((0, ModelFile.open(config.model.path).n_layer))


def _versions(here: MachineFacts | None) -> ReceiptVersions:
    from ggpipe._version import __version__

    own = commit()
    return ReceiptVersions(
        ggpipe=__version__ + (f" (commit {own})" if own else ""),
        llama_cpp_python=here.libllama if here else "",
        mpi=here.mpi if here else "",
        mpirun=here.mpirun.partition(": ")[2] if here else "",  # without its path
        python=here.python if here else "",
        system=here.system if here else "",
    )


def write_receipt(
    path: Path,
    surroundings: Surroundings,
    config: EngineConfig,
    work: BenchWork,
    engine: EngineClient,
    runs: Sequence[BenchRun],
    terminal: Terminal | None,
) -> Receipt:
    """Write the receipt of a benchmark with at least one run. Raises UsageError if the file cannot be written."""
    with FileProgress(terminal, "Hashing the models") as progress:
        receipt = receipt_of(
            Measured(
                config=config,
                work=work,
                runs=runs,
                ranks=engine.ranks,
                n_ctx=engine.n_ctx,
                profile=surroundings.profile,
                facts=surroundings.facts,
                versions=surroundings.versions,
                words=sys.argv[1:],
            ),
            progress,
        )
    write_text(path, as_text(receipt))
    return receipt
