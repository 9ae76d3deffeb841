"""The simulator against receipts: what is simulated is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from support import in_process
from support.commands import ROOT

from ggpipe.cluster import receipt as receipts
from ggpipe.cluster.receipt import Receipt, ReceiptRun
from ggpipe.sim.against_receipt import compare

PATH = ROOT / "docs" / "receipts" / "2026-11-25-bundled-pair.json"


@pytest.fixture(scope="module")
def receipt() -> Receipt:
    """One prompt of a receipt, which is enough."""
    own = receipts.read(PATH)
    return msgspec.structs.replace(own, runs=tuple(run for run in own.runs if run.prompt == "tale"))


def faster(run: ReceiptRun, factors: dict[str, float]) -> ReceiptRun:
    return msgspec.structs.replace(run, tokens_per_s=run.tokens_per_s * factors.get(run.mode, 1))


def test_all_modes_are_compared(receipt: Receipt) -> None:
    done: list[tuple[int, int]] = []
    found = compare(receipt, lambda *progress: done.append(progress))
    assert [own.mode for own in found] == ["iterative", "speculative", "async", "single"]
    assert all(own.prompt is None for own in found), "there is only one"
    assert done == [(n, 12) for n in range(1, 13)], "five outputs for each of the modes with draft tokens"
    for own in found:
        speeds = sorted(run.tokens_per_s for run in receipt.runs if run.mode == own.mode)
        assert own.measured.tokens_per_s == pytest.approx(speeds[2])
        assert own.rounds.middle == pytest.approx(speeds[2])
        assert own.speed_ratio == pytest.approx(own.simulated.tokens_per_s / speeds[2])
        assert (own.gain_ratio is None) == (own.mode == "iterative")
        assert own.ttft_ratio is not None


def test_it_says_how_far_off_it_is(receipt: Receipt) -> None:
    """Machines that were twice as fast as their profile, in one mode."""
    usual = {own.mode: own for own in compare(receipt)}
    runs = tuple(faster(run, {"async": 2}) for run in receipt.runs)
    twice = {own.mode: own for own in compare(msgspec.structs.replace(receipt, runs=runs))}
    assert twice["async"].simulated == usual["async"].simulated
    assert twice["async"].speed_ratio == pytest.approx(usual["async"].speed_ratio / 2)
    assert usual["async"].gain_ratio is not None
    assert twice["async"].gain_ratio == pytest.approx(usual["async"].gain_ratio / 2)
    assert twice["iterative"] == usual["iterative"]


def test_without_iterative_there_are_no_gains(receipt: Receipt) -> None:
    runs = tuple(run for run in receipt.runs if run.mode == "async")
    (only,) = compare(msgspec.structs.replace(receipt, runs=runs))
    assert (only.mode, only.measured.gain, only.simulated.gain, only.gain_ratio) == ("async", None, None, None)


def test_a_better_draft_is_simulated_as_such(receipt: Receipt) -> None:
    """The receipt says how often each drafter was right, and the simulator believes it."""

    def with_right(share: float) -> float:
        runs = tuple(
            msgspec.structs.replace(
                run,
                drafters=tuple(
                    msgspec.structs.replace(own, judged=100, right=round(100 * share), in_output=0)
                    for own in run.drafters
                ),
            )
            for run in receipt.runs
        )
        found = compare(msgspec.structs.replace(receipt, runs=runs))
        return next(own.simulated.tokens_per_s for own in found if own.mode == "speculative")

    assert with_right(0.9) > 1.2 * with_right(0.3)


def test_a_draft_model_inside_the_head(receipt: Receipt) -> None:
    """Its layers are on rank 0, which has threads for it of their own."""
    inside = tuple(msgspec.structs.replace(rank, rank=0) if rank.model == 1 else rank for rank in receipt.ranks)
    profile = receipt.profile
    two = msgspec.convert(
        msgspec.to_builtins(profile)
        | {
            "ranks": msgspec.to_builtins(profile.ranks[:2]),
            "links": [msgspec.to_builtins(link) for link in profile.links if max(link.source, link.target) < 2],
            "sums": [],
        },
        type(profile),
    )
    found = compare(msgspec.structs.replace(receipt, ranks=inside, profile=two))
    assert all(own.simulated.tokens_per_s > 0 for own in found)


# The command


def test_from_the_command_line(tmp_path: Path, full: bool) -> None:
    path, own = tmp_path / "receipt.json", receipts.read(PATH)
    if not full:
        own = msgspec.structs.replace(own, runs=tuple(run for run in own.runs if run.prompt in ("tale", "program")))
    path.write_text(receipts.as_text(own))
    done = in_process.ggpipe("simulate", "--against", path, "--json", tmp_path / "off.json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("measured on 2026-11-25 with ggpipe 0.1.0")
    titles = next(i for i, line in enumerate(lines) if line.startswith("mode "))
    assert [line.split()[0] for line in lines[titles + 1 : titles + 5]] == [
        "iterative", "speculative", "async", "single",
    ]  # fmt: skip
    assert lines[titles + 6].split()[:2] == ["t/s", "after"]
    read = json.loads((tmp_path / "off.json").read_text())
    assert {own["prompt"] for own in read["results"]} >= {None, "tale", "program"}
    assert all(own["speed_ratio"] > 0 for own in read["results"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--against", "nothing.json"), ("cannot read the receipt nothing.json",)),
        (("--against", "pyproject.toml"), ("pyproject.toml is not a receipt", "ggpipe bench --receipt")),
        (("--against", PATH, "--sweep", "draft=2..4"), ("--sweep does not go with --against",)),
        (("--against", PATH, "-n", 8), ("-n/--predict does not go with --against",)),
        (("nodes4-gigabit", "--against", PATH), ("CLUSTER does not go with --against",)),
        (("--against", PATH, "--json", "/nowhere/x.json"), ("/nowhere",)),
        ((), ("CLUSTER",)),
    ],
)
def test_arguments_that_make_no_sense(arguments: tuple[object, ...], words: tuple[str, ...]) -> None:
    done = in_process.ggpipe("simulate", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
