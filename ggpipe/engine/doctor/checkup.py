"""A checkup of several machines: asks all of them at the same time, and judges the answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ggpipe.channel.link import address_for
from ggpipe.engine.doctor.facts import MARK, MachineFacts, Questions
from ggpipe.engine.doctor.links import LinkServer
from ggpipe.engine.doctor.rules import Finding, Reference, Wanted, findings, why_no_facts
from ggpipe.errors import RunError, Setting
from ggpipe.launch.remote_shell import Answer, ask_all, is_this_machine, why_unreached

_HERE = "localhost"


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """The state of all machines."""

    facts: dict[str, MachineFacts]
    """Of the machines that have answered."""
    findings: tuple[Finding, ...]

    @property
    def has_failed(self) -> bool:
        """Whether a run would fail."""
        return any(finding.is_fatal for finding in self.findings)


def check_up(hosts: Sequence[str], models: Sequence[Path], wanted: Callable[[str], Wanted], limit_s: float) -> Checkup:
    """Check machines, within about `limit_s` seconds. `wanted`: what the run needs of each of them.

    Raises RunError if this machine cannot be examined.
    """
    others = [host for host in hosts if not is_this_machine(host)]
    begun_s = time.time()
    try:
        with LinkServer() as links:
            command = _command(models, f"{address_for(others[0])}:{links.port}" if others else "", links.secret)
            answers = ask_all(dict.fromkeys([*hosts, *([] if len(others) < len(hosts) else [_HERE])]), command, limit_s)
    except OSError as e:
        raise RunError(f"cannot examine machines: {e}") from e
    ended_s = time.time()
    facts = {host: own for host, answer in answers.items() if (own := _facts(answer)) is not None}
    here = next((host for host in answers if answers[host].is_local), _HERE)
    if here not in facts:
        said = " ".join(answers[here].errors.split()[-30:])
        raise RunError(
            f"cannot examine this machine within {limit_s:g} s: ",
            *((said,) if said else ("raise ", Setting("launch_timeout_s"))),
        )
    reference = Reference(host=here, facts=facts[here], fingerprints=_fingerprints(here, facts), program=_program())
    found: list[Finding] = []
    for host in hosts:
        problem, cure = why_unreached(host, answers[host], limit_s)
        if problem:
            found.append(Finding(host=host, is_fatal=True, problem=problem, cure=cure))
        elif host not in facts:
            answer = answers[host]
            found.append(why_no_facts(host, answer.code, f"{answer.output}\n{answer.errors}", limit_s, reference))
        else:
            own = facts[host]
            off_s = min(own.time_s - begun_s, 0.0) + max(own.time_s - ended_s, 0.0)
            found += findings(host, own, reference, wanted(host), off_s)
    if here not in hosts:
        facts.pop(here)
    return Checkup(facts=facts, findings=tuple(found))


def facts_of(hosts: Sequence[str], limit_s: float) -> dict[str, MachineFacts]:
    """What machines have, of those that answer within `limit_s` seconds. Raises RunError if processes cannot start."""
    try:
        answers = ask_all(dict.fromkeys(hosts), _command([], "", ""), limit_s)
    except OSError as e:
        raise RunError(f"cannot examine machines: {e}") from e
    return {host: own for host, answer in answers.items() if (own := _facts(answer)) is not None}


def _command(models: Sequence[Path], link_to: str, secret: str) -> list[str]:
    questions = Questions(models=tuple(str(path.absolute()) for path in models), link_to=link_to, secret=secret)
    return ["env", questions.environment, sys.executable, "-P", "-m", "ggpipe", "facts"]


def _facts(answer: Answer) -> MachineFacts | None:
    for line in answer.output.splitlines():
        if line.startswith(MARK):
            try:
                return msgspec.json.decode(line.removeprefix(MARK), type=MachineFacts)
            except msgspec.MsgspecError:  # another version
                return None
    return None


def _fingerprints(here: str, facts: dict[str, MachineFacts]) -> dict[str, tuple[str, str]]:
    """See `Reference.fingerprints`: this machine's, or else the first one that has the model."""
    found: dict[str, tuple[str, str]] = {}
    for host in (here, *facts):
        for model in facts[host].models:
            if model.fingerprint:
                found.setdefault(model.path, (host, model.fingerprint))
    return found


def _program() -> list[str]:
    """Folders that other machines need: Python's environment, and ggpipe's sources if they are elsewhere."""
    prefix, package = Path(sys.prefix), Path(__file__).parents[3]
    return [str(prefix)] if package.is_relative_to(prefix) else [str(prefix), str(package)]
