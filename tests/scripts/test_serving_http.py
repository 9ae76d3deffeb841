"""The bench of servers runs, and its figures are those of whole streams."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_bench(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ["--bundled", "--users", "2", "-n", "8", "--rounds", "1", "--log", str(log), "--llama-server", ""]
    command = [sys.executable, "-m", "scripts.bench.serving", "--http", *flags, "--servers", "api", "stages", "llama"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"one stream, ITL p50 over HTTP / by the API: [\d.]+ \[", ended.stdout)
    assert re.search(r"2 streams, tokens/s over HTTP / by the API: [\d.]+ \[", ended.stdout)
    rows = re.findall(r"^(\w+) +(\d) +([\d.]+) ", ended.stdout, re.MULTILINE)
    assert {row[:2] for row in rows} == {("api", "1"), ("api", "2"), ("stages", "1"), ("stages", "2"), ("llama", "2")}
    assert all(float(tps) > 0 for _, _, tps in rows)
    assert log.read_text().count("POST /v1/completions 200") == 6  # in both rounds
