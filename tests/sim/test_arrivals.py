"""When the requests of a simulation arrive, and files of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpipe.errors import UsageError
from ggpipe.sim.arrivals import MOST_REQUESTS, Arrival, Traffic, read_arrivals


def test_users_ask_again_when_they_are_answered() -> None:
    traffic = Traffic(users=3)
    assert [arrival.after for arrival in traffic.arrivals()] == [None, None, None, 0, 1, 2]
    assert traffic.at_a_time == 3
    assert [arrival.after for arrival in Traffic(users=2, n_total=5).arrivals()] == [None, None, 0, 1, 2]


def test_requests_at_a_rate() -> None:
    arrivals = Traffic(rate=2.0, n_total=2000).arrivals()
    times_s = [arrival.at_s for arrival in arrivals]
    assert times_s == sorted(times_s)
    assert 900 < times_s[-1] < 1100
    gaps_s = [b - a for a, b in itertools.pairwise(times_s)]
    assert 0.6 < sum(gap > 0.25 for gap in gaps_s) / len(gaps_s) < 0.61 + 0.03, "exp(-0.5) of them"
    assert arrivals == Traffic(rate=2.0, n_total=2000).arrivals()
    assert arrivals != Traffic(rate=2.0, n_total=2000, seed=1).arrivals()
    assert len(Traffic(rate=1.0).arrivals()) == 32


def test_requests_at_once() -> None:
    traffic = Traffic(n_total=6)
    assert traffic.arrivals() == (Arrival(at_s=0.0),) * 6
    assert traffic.at_a_time == 4
    assert Traffic(n_total=6, n_requests=5).at_a_time == 5
    assert Traffic(n_total=2).at_a_time == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"users": 0}, "`users` must be a number from 1 to 256, got 0"),
        ({"rate": 0.0}, "`rate` must be a number of requests per second above 0, got 0"),
        ({"rate": float("inf")}, "`rate` must be"),
        ({"n_total": MOST_REQUESTS + 1}, "`requests` must be a number from 1 to 2000, got 2001"),
        ({"users": 2, "n_requests": 257}, "`concurrent` must be a number from 1 to 256, got 257"),
        ({"users": 2, "rate": 1.0}, "`users` and `rate` both say when requests arrive"),
        ({"rate": 1.0, "listed": (Arrival(at_s=0.0),)}, "`rate` and `arrivals` both say"),
        ({"n_total": 1, "listed": (Arrival(at_s=0.0),)}, "leave out `requests`"),
        ({"users": 4, "n_total": 3}, "`requests` must be at least 4, one per user, got 3"),
    ],
)
def test_traffic_that_makes_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        Traffic(**fields)


@pytest.mark.parametrize(
    "text",
    [
        "0.5,100,20\n0,,\n2\n",
        "arrival_s,prompt_tokens,tokens\n0.5,100,20\n\n0,,\n2,,\n",
        "arrival_s, tokens, prompt_tokens\r\n0.5, 20, 100\r\n0\r\n2\r\n",
        '{"arrival_s": 0.5, "prompt_tokens": 100, "tokens": 20}\n{"arrival_s": 0}\n{"arrival_s": 2}\n',
    ],
)
def test_files_of_arrivals(text: str, tmp_path: Path) -> None:
    path = tmp_path / "arrivals"
    path.write_text(text)
    assert read_arrivals(path) == (Arrival(at_s=0.0), Arrival(at_s=0.5, n_prompt=100, n_predict=20), Arrival(at_s=2.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have from 1 to 2000 arrivals, got 0"),
        (
            "arrival_s,prompt\n1,2\n",
            "the columns of arrivals are arrival_s, prompt_tokens, tokens, got arrival_s, prompt",
        ),
        ("1,2,3\nx,2,3\n", "line 2: arrival_s must be"),
        ("1,2,3,4\n", "line 1: .* are wanted, got 4 values"),
        ("-1\n", "line 1: arrival_s must be a time of 0 or more, got -1"),
        ("nan\n", "line 1: arrival_s must be a time of 0 or more"),
        ("1,0\n", "line 1: prompt_tokens must be 1 or more, got 0"),
        ("1,5,2.5\n", "line 1: tokens must be"),
        (",5,2\n", "line 1: arrival_s is missing"),
        ("9" * 200_000, "line 1: field larger than field limit"),
        ('{"arrival_s": 1}\n{"at": 1}\n', "line 2: at is not known here"),
        ('{"arrival_s": 1}\n{"arri\n', "line 2: "),
    ],
)
def test_bad_files_of_arrivals(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "arrivals"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_arrivals(path)
    assert "\n" not in str(caught.value)


def test_a_file_of_arrivals_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the arrivals"):
        read_arrivals(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not a text"):
        read_arrivals(tmp_path / "binary")


@given(st.binary(max_size=60))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    try:
        found = read_arrivals(path)
    except UsageError:
        return
    assert found
