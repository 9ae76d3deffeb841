"""A stage whose weights do not fit into memory; run it as root, as `scripts/bench/streaming`.

Two models, each as one stage of one rank: the inflated bundled target, whose weights every token reads, and a random
mixture as large as four layers of Qwen3-30B-A3B, whose tokens read 8 of 32 experts. Each is decoded in memory, and then
in a cgroup whose memory is what the program takes and a share of the weights: mapped (`--load-mode mmap`), so that the
kernel chooses what stays in memory, and streamed (`--load-mode stream`), in turn. A line for each model and share:
milliseconds of a run of one row, medians over the rounds; the ratio of the last two; how much a streamed run reads, and
how long it waits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.architectures import write

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, Run
from ggpipe.llama.bundled import inflated_pair
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import start
from ggpipe.llama.stage import Stage
from scripts.bench.layers import SHAPES
from scripts.models.quantize import quantize

SHARES = (0.75, 0.5, 0.25)
_PROGRAM_BYTES = 140e6  # Python, libraries, KV cells and compute buffers
_N_RUNS, _N_WARM = 24, 8
_CGROUPS = Path("/sys/fs/cgroup")


class MemoryLimit:
    """A cgroup for one process after another."""

    def __init__(self, n_bytes: float) -> None:
        """Raises OSError where there is no right to make one."""
        is_old = (_CGROUPS / "memory").is_dir()
        self._folder = Path(tempfile.mkdtemp(prefix="ggpipe-bench-", dir=_CGROUPS / "memory" if is_old else _CGROUPS))
        (self._folder / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(int(n_bytes)))

    def enter(self) -> None:
        """Move this process into it."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        """Remove it; its processes have ended."""
        for _ in range(50):
            try:
                self._folder.rmdir()
            except OSError:
                time.sleep(0.1)
            else:
                return


def measure(path: Path, stream_gb: float | None, threads: int) -> dict[str, float]:
    """Seconds of a run of one row, and of its waiting, and the bytes it reads: medians. `stream_gb`: None: mapped."""
    mode = "mmap" if stream_gb is None else "stream"
    model = ModelConfig(path=path, load_mode=mode, repack=False, stream_memory_gb=stream_gb)  # type: ignore[arg-type]
    file = ModelFile.open(path)
    stage = Stage(file, (0, file.n_layer), model, ContextConfig(n_ctx=256), (threads, threads))
    seconds: list[float] = []
    waits: list[float] = []
    n_read: list[float] = []
    for i in range(_N_WARM + _N_RUNS):
        rows = (Row(token=7 * i % 100, pos=i, seqs=(0,), request=0, logits_request=0),)
        run = Run(id=i + 1, rows=rows, logits_requests=(LogitsRequest(LogitsKind.TOP, 1),))
        seconds.append(stage.decode(run, None).compute_s)
        if stream_gb is not None:
            read, wait, _, _ = stage._native.take_stream_times()
            n_read.append(read)
            waits.append(wait)
    found = {"run": seconds, "wait": waits, "read": n_read}
    return {name: statistics.median(values[_N_WARM:] or [0]) for name, values in found.items()}


def measured(path: Path, stream_gb: float | None, threads: int, limit: MemoryLimit | None) -> dict[str, float]:
    """The same in a process of its own, within a limit, where what others have read of the file would not count."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-m", __spec__.name, "--measure", path, "-t", threads]
    command += ["--stream", stream_gb] if stream_gb is not None else []
    enter = limit.enter if limit is not None else None
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, check=True, preexec_fn=enter)
    return dict(json.loads(done.stdout))


def dense(folder: Path) -> Path:
    """A copy without holes, which would be read without a disk."""
    path = folder / "dense.gguf"
    with inflated_pair().target.open("rb") as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
    return path


def mixture(folder: Path) -> Path:
    """Its file."""
    shape = SHAPES["qwen3moe"]
    whole = write("qwen3moe", folder / "mixture.gguf", n_layer=4, sizes=shape.sizes, more=shape.more)
    path = quantize(whole, folder / "mixture-q4.gguf", "Q4_K_M")
    whole.unlink()
    return path


def bench(name: str, path: Path, threads: int, rounds: int) -> None:
    """Print a line for each share of the weights."""
    n_bytes = ModelFile.open(path).n_bytes
    for share in SHARES:
        limit = MemoryLimit(_PROGRAM_BYTES + share * n_bytes)
        ways = ((None, None), (None, limit), (share * n_bytes / 1e9, limit))
        try:
            found = [[measured(path, gb, threads, within) for gb, within in ways] for _ in range(rounds)]
        finally:
            limit.close()
        whole, mapped, streamed = (
            {key: statistics.median(one[key] for one in way) for key in way[0]} for way in zip(*found, strict=True)
        )
        times = "".join(f" {way['run'] * 1e3:9.1f}" for way in (whole, mapped, streamed))
        ratio, read, wait = streamed["run"] / mapped["run"], streamed["read"] / 1e6, streamed["wait"] * 1e3
        print(f"{name:8} {share:6.0%}{times} {ratio:6.2f} {read:8.1f} {wait:8.1f}", flush=True)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--stream", type=float, metavar="GB", help=argparse.SUPPRESS)
    args = parser.parse_args()
    start()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args.stream, args.threads)))
        return
    print(f"streaming: {args.threads} threads, {args.rounds} rounds")
    print("model    memory in memory   mapped  streamed  ratio  MB read  ms wait")
    for make in (dense, mixture):
        with tempfile.TemporaryDirectory(prefix="ggpipe-bench-") as folder:
            bench(make.__name__, make(Path(folder)), args.threads, args.rounds)


if __name__ == "__main__":
    main()
