"""`ggpipe doctor`: what is wrong with the machines of a run, before it starts."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ggpipe._version import __version__
from ggpipe.cli.messages import show
from ggpipe.config.engine import EngineConfig
from ggpipe.core.layout import lay_out
from ggpipe.display.format import harmless, human_bytes, human_seconds
from ggpipe.engine.doctor.checkup import Checkup, check_up
from ggpipe.engine.doctor.facts import MachineFacts
from ggpipe.engine.doctor.rules import Finding, Wanted
from ggpipe.errors import LaunchError, ModelError, RunError
from ggpipe.launch.job import slots_of
from ggpipe.launch.reach import unreachable
from ggpipe.options.doctor import DoctorSettings
from ggpipe.options.engine_config import engine_config
from ggpipe.options.option import Options
from ggpipe.options.settings import ModelSettings, RankSettings


def run(options: Options) -> int:
    """Check all machines, and print a line for each, or for each thing that is wrong. Returns the exit code."""
    models, hostfile = options[ModelSettings], options[RankSettings].hostfile
    slots = slots_of(hostfile) or ["localhost"]
    # Without a model, only the machines are checked.
    config = engine_config(options if models.target else options.with_values({"model": Path("none")}))
    ranks = _hosts_of_ranks(config, slots)
    paths = [path for path in (models.target, *models.drafts) if path is not None]
    wanted = _wants(config, ranks, models.target is not None)
    limit_s = config.pipeline.launch_timeout_s
    checkup = check_up(list(dict.fromkeys(slots)), paths, wanted, limit_s)
    if not checkup.has_failed and len(set(slots)) > 1:
        checkup = _with_mpirun(checkup, slots)
    settings = options[DoctorSettings]
    if settings.json:
        content = {
            "machines": checkup.facts,
            "findings": [dataclasses.asdict(finding) for finding in checkup.findings],
        }
        print(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
    else:
        for line in _report(checkup) if settings.report else _lines(slots, checkup):
            print(line)
    n_fatal = sum(finding.is_fatal for finding in checkup.findings)
    if n_fatal:
        show(f"a run would fail: {n_fatal} of {len(checkup.findings)} findings must be mended first")
    return RunError.exit_code if checkup.has_failed else 0


def _hosts_of_ranks(config: EngineConfig, slots: Sequence[str]) -> list[str]:
    """The machine of each rank. If there are more ranks than slots, mpirun starts again with the first machine."""
    split = config.pipeline.n_ranks
    n_ranks = len(slots) if split is None else split + config.n_draft_ranks
    return [slots[rank % len(slots)] for rank in range(max(n_ranks, 1))]


def _wants(config: EngineConfig, ranks: Sequence[str], has_model: bool) -> Callable[[str], Wanted]:
    needs = _needs_by_rank(config, len(ranks)) if has_model else {}

    def wanted(host: str) -> Wanted:
        own = [rank for rank, its_host in enumerate(ranks) if its_host == host]
        given = [max(config.pipeline.threads_of(rank, 0)) for rank in own]
        return Wanted(
            n_ranks=len(own),
            threads=sum(given),
            needed_bytes=sum(needs.get(rank, 0.0) for rank in own),
            locks_memory="mlock" in config.model.load_mode,
            places_numa=config.model.numa is not None,
            gets_weights=config.pipeline.send_weights and host != ranks[0],
        )

    return wanted


def _needs_by_rank(config: EngineConfig, n_ranks: int) -> dict[int, float]:
    """Bytes of each rank; empty if the models are not on this machine, or do not allow this split."""
    from ggpipe.engine.handshake import needs_by_rank
    from ggpipe.llama.gguf import ModelFile

    try:
        target = ModelFile.open(config.model.path)
        drafts = [
            None  # the target's head runs it
            if head is None
            else lay_out(ModelFile.open(draft.model.path).n_layer, draft.n_ranks, draft.layer_split, head)
            for draft, head in itertools.zip_longest(config.drafts, config.draft_heads(n_ranks))
        ]
        layout = lay_out(target.n_layer, n_ranks - config.n_draft_ranks, config.pipeline.layer_split)
    except (ModelError, LaunchError):
        return {}
    return {rank: memory.total for rank, memory in needs_by_rank(config, target, layout, drafts).items()}


def _with_mpirun(checkup: Checkup, slots: Sequence[str]) -> Checkup:
    """The checkup, and whether mpirun starts a process on each machine."""
    away = unreachable(list(dict.fromkeys(slots)), lambda: None)
    found = [
        Finding(
            host=host, is_fatal=True, problem="mpirun starts no process there", cure=f"mpirun --host {host} hostname"
        )
        for host in slots
        if host in away
    ]
    return dataclasses.replace(checkup, findings=(*checkup.findings, *dict.fromkeys(found)))


def _lines(slots: Sequence[str], checkup: Checkup) -> list[str]:
    hosts = list(dict.fromkeys(slots))
    width, lines = max(map(len, hosts)), []
    for host in hosts:
        found = [finding for finding in checkup.findings if finding.host == host]
        name = harmless(host).ljust(width)
        if not found:
            lines.append(f"{name}  ok       {_summary(checkup.facts[host])}")
        for finding in sorted(found, key=lambda finding: not finding.is_fatal):
            what = "fails" if finding.is_fatal else "warning"
            lines.append(f"{name}  {what:<7}  {harmless(finding.problem)}. To mend: {finding.cure}")
    return lines


def _summary(facts: MachineFacts) -> str:
    parts = [f"{facts.cores} cores", f"{human_bytes(facts.available_bytes)} available"]
    if facts.link is not None:
        parts += [human_seconds(facts.link.round_trip_s), f"{facts.link.bytes_per_s * 8 / 1e9:.2g} Gbit/s"]
    return ", ".join(parts)


def _report(checkup: Checkup) -> list[str]:
    """All facts, for a bug report."""
    lines = [f"ggpipe {__version__}: ggpipe {' '.join(sys.argv[1:])}"]
    for finding in checkup.findings:
        lines.append(f"{finding.host}: {'fails' if finding.is_fatal else 'warning'}: {finding.problem}")
    for host, facts in checkup.facts.items():
        lines += ["", f"{host}:"]
        lines += [f"  {name}: {value}" for name, value in msgspec.to_builtins(facts).items()]
    return lines
