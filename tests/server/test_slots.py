"""Slots, and conversations saved on disk."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from support.commands import TARGET
from support.in_process import ggpipe
from support.servers import Serving, server

RANKS = ("--mpi-layer-split", "0.5,0.5", "-c", "1024", "-np", "2", "--exact")
TALE = "Once upon a time there was a king who had three sons, and the youngest of them was called"


def complete(serving: Serving, prompt: str, **further: object) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "ignore_eos": True, **further}
    status, answer, _ = serving.ask("POST", "/completion", body)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


def act(serving: Serving, slot: object, action: str, name: str = "") -> tuple[int, Any]:
    status, answer, _ = serving.ask("POST", f"/slots/{slot}?action={action}", {"filename": name})
    return status, answer


def slots(serving: Serving) -> list[dict[str, Any]]:
    status, answer, _ = serving.ask("GET", "/slots")
    assert status == 200
    found: list[dict[str, Any]] = answer
    return found


def test_a_saved_conversation_outlives_a_killed_server(tmp_path: Path) -> None:
    folder = ("--slot-save-path", str(tmp_path))
    with server(*RANKS, *folder) as own:
        own.wait_until_ready()
        assert [(slot["id"], slot["is_processing"]) for slot in slots(own)] == [(0, False), (1, False)]
        first = complete(own, TALE)
        assert first["id_slot"] == 0
        n = first["tokens_evaluated"] + 8
        longer = TALE + first["content"] + " and"
        assert slots(own)[0]["n_prompt_tokens"] == n
        assert slots(own)[0]["next_token"][0] == {
            "has_next_token": False, "has_new_line": "\n" in first["content"], "n_remain": -1, "n_decoded": 0,
        }  # fmt: skip
        status, saved = act(own, 0, "save", "tale")
        assert (status, saved["n_saved"], saved["filename"]) == (200, n - 1, "tale")
        assert saved["n_written"] == sum(file.stat().st_size for file in tmp_path.iterdir())
        assert {file.name for file in tmp_path.iterdir()} == {"tale", "tale.rank0", "tale.rank1"}
        assert act(own, 0, "erase") == (200, {"id_slot": 0, "n_erased": n})
        expected = complete(own, longer)
        assert expected["timings"]["cache_n"] == 0
        assert act(own, 0, "save", "longer")[0] == 200
        own.process.send_signal(signal.SIGKILL)
        own.process.wait()
    with server(*RANKS, *folder, "--keep-slots") as own:
        own.wait_until_ready()
        status, restored = act(own, 1, "restore", "tale")
        assert (status, restored["n_restored"], restored["n_read"]) == (200, n - 1, saved["n_written"])
        assert slots(own)[1]["n_prompt_tokens"] == n
        got = complete(own, longer)
        assert got["timings"]["cache_n"] == n - 1
        assert got["content"] == expected["content"]
        wrong = [act(own, 0, "restore", name) for name in ("none", "../tale", "tale.rank0", "/etc/passwd", "")]
        assert [(status, answer["error"]["param"]) for status, answer in wrong] == [(400, "filename")] * 5
        (tmp_path / "link").symlink_to("tale")
        (tmp_path / "tale.rank1").write_bytes((tmp_path / "longer.rank1").read_bytes())
        assert act(own, 0, "restore", "link")[0] == 400
        status, answer = act(own, 0, "restore", "tale")
        assert status == 400
        assert "tale.rank1: it has other tokens" in answer["error"]["message"]
        assert str(tmp_path) not in answer["error"]["message"]
        assert [act(own, slot, "erase")[0] for slot in (2, "x", "-0", "0000000009", "9" * 5000)] == [400] * 5
        assert act(own, 0, "forget")[0] == 400
        complete(own, "The cat", n_predict=2)  # the failures left nothing over
        assert own.end() == 0
    with server(*RANKS, *folder, "--keep-slots") as own:
        own.wait_until_ready()
        again = complete(own, longer)
        assert again["timings"]["cache_n"] == n
        assert again["content"] == expected["content"]


def test_all_slots_in_use() -> None:
    with server("-c", "32768", "-np", "1") as own:
        own.wait_until_ready()
        assert act(own, 0, "erase")[0] == 501
        with own.streaming("/completion", {"prompt": TALE, "n_predict": 32000, "ignore_eos": True}):
            own.wait_for(lambda: slots(own)[0]["next_token"][0]["n_decoded"] > 0)
            assert slots(own)[0]["is_processing"]
            assert slots(own)[0]["params"]["n_predict"] == 32000
            assert own.ask("GET", "/slots?fail_on_no_slot=1")[0] == 503
        own.wait_for(lambda: own.ask("GET", "/slots?fail_on_no_slot=1")[0] == 200)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    missing = ggpipe("serve", "-m", TARGET, "--port", "0", "-t", "1", "--slot-save-path", tmp_path / "none")
    assert missing.returncode == 2
    assert "--slot-save-path" in missing.stderr.splitlines()[-1]
    without = ggpipe("serve", "-m", TARGET, "--keep-slots")
    assert without.returncode == 2
    assert without.stderr.startswith("ggpipe: error: --keep-slots needs a folder")
