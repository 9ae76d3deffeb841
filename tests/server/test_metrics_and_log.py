"""Metrics and the log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.commands import ROOT
from support.servers import DRAFT, Serving, server

from ggpipe.core.messages import RunRecord, Span
from ggpipe.core.request import Finish
from ggpipe.errors import SettingError
from ggpipe.server.log import LogFile
from ggpipe.server.totals import Totals
from ggpipe.stats.records import RankStats, RequestStats

KEY = "never-shown"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Serving]:
    with server(
        "-md", str(DRAFT), "--mpi-layer-split", "0.5,0.5", "--mode", "speculative", "-c", "2048", "--metrics",
        "--api-key", KEY,
        "--log-file", str(folder / "log"), "--log-format", "json", "--alias", "tales",
    ) as own:  # fmt: skip
        own.wait_until_ready()
        yield own


def ask(serving: Serving, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    return serving.ask(method, path, body, {"X-Api-Key": KEY, **headers})[:2]


def samples(serving: Serving) -> dict[str, dict[str, float]]:
    """Samples by name and by joined label values. Checks that all metrics have a help text and a type."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(ask(serving, "GET", "/metrics")[1]):
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            found.setdefault(sample.name, {})[" ".join(sample.labels.values())] = sample.value
    return found


def test_metrics_and_the_dashboard_that_asks_for_them(serving: Serving) -> None:
    body = {"prompt": "Once upon a time there was a king", "max_tokens": 60, "temperature": 0}
    for _ in range(2):
        assert ask(serving, "POST", "/v1/completions", body)[0] == 200
    serving.wait_for(lambda: samples(serving)["ggpipe:requests_total"].get("length") == 2)
    serving.wait_for(lambda: "ggpipe:rank_resident_bytes" in samples(serving))  # requested by the first scrape
    found = samples(serving)
    assert found["llamacpp:tokens_predicted_total"][""] == 120
    assert found["llamacpp:prompt_tokens_cached_total"][""] > 0
    assert found["ggpipe:prefix_cache_hits_total"][""] == 1
    assert found["llamacpp:n_busy_slots_per_decode"][""] == pytest.approx(1)
    n_cells = found["llamacpp:kv_cache_tokens"][""]
    assert 60 < n_cells < 100  # of one kept sequence
    assert found["llamacpp:kv_cache_usage_ratio"][""] == n_cells / found["ggpipe:ctx_size"][""]
    accepted = found["llamacpp:spec_decode_num_accepted_tokens_total"][""]
    assert 0 < accepted == sum(found["llamacpp:spec_decode_num_accepted_tokens_per_pos_total"].values())
    assert found["ggpipe:time_to_first_token_seconds_count"][""] == 2
    assert found["ggpipe:inter_token_latency_seconds_count"][""] == 118
    assert found["ggpipe:request_queue_time_seconds_count"][""] == 2
    assert found["ggpipe:state"] == {"loading": 0, "ok": 1, "restarting": 0, "stopping": 0}
    assert found["ggpipe:http_responses_total"]["/v1/completions 200"] == 2
    assert max(found["ggpipe:link_runs_total"].values()) > 0
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = set(re.findall(r"(?:llamacpp|ggpipe):\w+", json.dumps(dashboard["panels"])))
    assert asked <= set(found)
    own = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in found if ":" in name}
    shown = {re.sub(r"_bucket$", "", name) for name in asked}
    assert own - shown == {"ggpipe:loaded_ratio", "ggpipe:rank_occupancy", "ggpipe:rank_layers"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_a_line_for_each_request(serving: Serving, folder: Path) -> None:
    body = {"prompt": "Once upon", "max_tokens": 5, "stream": True}
    answer = serving.ask("POST", "/v1/completions", body, {"X-Api-Key": KEY, "X-Request-Id": "mine-1"})
    assert answer[2]["x-request-id"] == "mine-1"
    serving.wait_for(lambda: "mine-1" in (folder / "log").read_text())
    (folder / "log").rename(folder / "old")
    assert serving.ask("POST", "/v1/completions", body, {"X-Api-Key": 'no"\\n', "X-Request-Id": "a b"})[0] == 401
    assert ask(serving, "GET", "/nowhere")[0] == 404
    serving.wait_for(lambda: (folder / "log").exists() and len((folder / "log").read_text().splitlines()) >= 2)
    old, new = ([json.loads(line) for line in (folder / name).read_text().splitlines()] for name in ("old", "log"))
    line = next(line for line in old if line.get("id") == "mine-1")
    assert (line["path"], line["status"], line["model"]) == ("/v1/completions", 200, "tales")
    assert (line["tokens"], line["finish"]) == (5, "length")
    assert {"prompt_tokens", "cached_tokens", "accepted_tokens", "queued_s", "ttft_s", "tokens_per_s"} <= set(line)
    assert [(line["status"], line["id"] == "a b") for line in new] == [(401, False), (404, False)]
    serving.wait_for(lambda: any(json.loads(line).get("id") == "mine-1" for line in list(serving.lines)))
    assert KEY not in (folder / "old").read_text() + (folder / "log").read_text() + "".join(serving.lines)
    assert not stat.S_IMODE((folder / "log").stat().st_mode) & 0o007


def line(text: str) -> logging.LogRecord:
    return logging.LogRecord("", logging.INFO, "", 0, "%s", (text,), None)


def test_a_log_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = LogFile(Path("/dev/full"))
    for _ in range(3):
        full.handle(line("lost"))
    assert capsys.readouterr().err.count("lines are dropped") == 1
    with pytest.raises(SettingError, match="`log_file`"):
        LogFile(tmp_path / "none" / "log")
    path = tmp_path / "log"
    own = LogFile(path)
    own.handle(line("one"))
    os.truncate(path, 0)  # as logrotate's copytruncate does
    own.handle(line("two"))
    assert path.read_text() == "two\n"
    path.unlink()
    tmp_path.chmod(0o500)
    own.handle(line("three"))  # the folder is read-only, except for root
    tmp_path.chmod(0o700)
    own.handle(line("four"))
    assert path.read_text().endswith("four\n")


def test_links_are_not_measured_by_clocks_that_were_not_compared() -> None:
    spans = tuple(
        Span(rank=rank, start_s=start_s, compute_s=1, busy_s=1, sent_bytes=0, n_rows=1)
        for rank, start_s in ((0, 10.0), (1, 11.5), (2, 500.0))
    )
    run = RunRecord(
        id=0, request=1, n_rows=2, n_run_rows=4, n_draft_tokens=0, cancelled=False, spans=spans
    )  # fmt: skip
    ranks = [RankStats(rank=rank, host=host, layers=(rank, rank + 1)) for rank, host in enumerate("aab")]

    async def add() -> Totals:
        totals = Totals()
        stats = RequestStats(n_prompt=3, finish=Finish.LENGTH, runs=[run])
        stats.counters.by_lead = {1: [2, 1], 3: [1, 1], 900: [1, 1]}
        totals.add(stats, ranks)
        await asyncio.sleep(0)
        assert not stats.runs, "slots would keep them for as long as the server runs"
        return totals

    totals = asyncio.run(add())
    found = {
        (sample.name.partition(":")[2], *sample.labels.values()): sample.value
        for family in totals.registry.collect()
        for sample in family.samples
        if family.name.endswith(("link_seconds", "per_pos"))
    }
    accepted = "spec_decode_num_accepted_tokens_per_pos_total"
    assert found == {
        ("link_seconds_total", "0", "a", "0"): 0.25, (accepted, "0"): 1, (accepted, "2"): 1, (accepted, "63"): 1,
    }  # fmt: skip
    assert (totals.runs, totals.run_parts) == (0.5, 1)
