"""Processors that cluster files know by name, and the speeds that follow from their data sheets.

The columns are cores, base clock, memory channels and their fastest standard memory, from the manufacturers' data
sheets (ark.intel.com; amd.com, "specifications"). Of processors with two kinds of cores, only the fast ones count.

Speeds are estimates: llama.cpp reaches about 60 % of a data sheet's memory bandwidth, its 4-bit matrix products run at
about 21 GFLOP/s per core and GHz with AVX2 (90 to 100 GFLOP/s at 4.2 to 4.5 GHz), and one core alone reads 11 GB/s of a
server's DDR4, 12 of a desktop's, and 20 of DDR5. `ggpipe profile` measures them.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

_REACHED = 0.6
_GFLOPS_PER_GHZ = 21.0
_SERVER_CORE_GB_PER_S, _DESKTOP_CORE_GB_PER_S, _DDR5_CORE_GB_PER_S = 11.0, 12.0, 20.0
_DDR5_MT_PER_S, _DESKTOP_CHANNELS = 4000, 2
_BYTES = 8  # that a channel transfers at a time

USUAL_CORE_GFLOPS = 60.0
"""Of a core that nothing is known about: one at 2.9 GHz, with AVX2."""


@dataclass(frozen=True, slots=True)
class Processor:
    """One socket."""

    name: str
    cores: int
    ghz: float
    channels: int
    mt_per_s: int
    """Million transfers per second of a channel."""

    @property
    def gb_per_s(self) -> float:
        """What all cores together read from memory."""
        return _REACHED * self.channels * self.mt_per_s * _BYTES / 1e3

    @property
    def core_gb_per_s(self) -> float:
        """What one core alone reads from memory."""
        if self.mt_per_s > _DDR5_MT_PER_S:
            return _DDR5_CORE_GB_PER_S
        return _SERVER_CORE_GB_PER_S if self.channels > _DESKTOP_CHANNELS else _DESKTOP_CORE_GB_PER_S

    @property
    def core_gflops(self) -> float:
        """Of one core, in matrix products of 4-bit weights."""
        return _GFLOPS_PER_GHZ * self.ghz


_TABLE = """
Xeon E5-2670 v3         12  2.3   4  2133
Xeon E5-2680 v3         12  2.5   4  2133
Xeon E5-2690 v3         12  2.6   4  2133
Xeon E5-2680 v4         14  2.4   4  2400
Xeon E5-2690 v4         14  2.6   4  2400
Xeon E5-2699 v4         22  2.2   4  2400
Xeon Silver 4114        10  2.2   6  2400
Xeon Gold 6130          16  2.1   6  2666
Xeon Gold 6148          20  2.4   6  2666
Xeon Platinum 8168      24  2.7   6  2666
Xeon Platinum 8180      28  2.5   6  2666
Xeon Silver 4214        12  2.2   6  2400
Xeon Gold 5218          16  2.3   6  2666
Xeon Gold 6226R         16  2.9   6  2933
Xeon Gold 6230          20  2.1   6  2933
Xeon Gold 6248          20  2.5   6  2933
Xeon Gold 6248R         24  3.0   6  2933
Xeon Platinum 8260      24  2.4   6  2933
Xeon Platinum 8280      28  2.7   6  2933
Xeon Silver 4314        16  2.4   8  2666
Xeon Gold 6330          28  2.0   8  2933
Xeon Gold 6338          32  2.0   8  3200
Xeon Gold 6348          28  2.6   8  3200
Xeon Platinum 8358      32  2.6   8  3200
Xeon Platinum 8380      40  2.3   8  3200
Xeon Gold 6430          32  2.1   8  4400
Xeon Platinum 8468      48  2.1   8  4800
Xeon Platinum 8480+     56  2.0   8  4800
Xeon Platinum 8592+     64  1.9   8  5600
EPYC 7551               32  2.0   8  2666
EPYC 7601               32  2.2   8  2666
EPYC 7302               16  3.0   8  3200
EPYC 7402               24  2.8   8  3200
EPYC 7452               32  2.35  8  3200
EPYC 7502               32  2.5   8  3200
EPYC 7702               64  2.0   8  3200
EPYC 7742               64  2.25  8  3200
EPYC 7313               16  3.0   8  3200
EPYC 7443               24  2.85  8  3200
EPYC 7513               32  2.6   8  3200
EPYC 7543               32  2.8   8  3200
EPYC 7713               64  2.0   8  3200
EPYC 7763               64  2.45  8  3200
EPYC 9124               16  3.0  12  4800
EPYC 9354               32  3.25 12  4800
EPYC 9454               48  2.75 12  4800
EPYC 9554               64  3.1  12  4800
EPYC 9654               96  2.4  12  4800
EPYC 9555               64  3.2  12  6000
EPYC 9655               96  2.6  12  6000
EPYC 9755              128  2.7  12  6000
Threadripper 3970X      32  3.7   4  3200
Threadripper PRO 5975WX 32  3.6   8  3200
Threadripper PRO 7975WX 32  4.0   8  5200
Ryzen 5 3600             6  3.6   2  3200
Ryzen 7 5800X            8  3.8   2  3200
Ryzen 9 5950X           16  3.4   2  3200
Ryzen 7 7700X            8  4.5   2  5200
Ryzen 9 7950X           16  4.5   2  5200
Ryzen 9 9950X           16  4.3   2  5600
Core i7-6700             4  3.4   2  2133
Core i7-7700             4  3.6   2  2400
Core i5-8500             6  3.0   2  2666
Core i7-8700             6  3.2   2  2666
Core i9-9900K            8  3.6   2  2666
Core i5-10400            6  2.9   2  2666
Core i7-10700            8  2.9   2  2933
Core i7-12700            8  2.1   2  4800
Core i9-12900K           8  3.2   2  4800
Core i7-13700K           8  3.4   2  5600
"""
_NOISE = re.compile(
    r"\((?:r|tm)\)|\b(?:amd|intel|cpu|processor|\d+-cores?|\d+th gen)\b|\bryzen (?=threadripper)|@.*", re.IGNORECASE
)
"""What /proc/cpuinfo and people write around a name."""


def _words(name: str) -> str:
    """A name in the form in which names are compared: `AMD EPYC 7763 64-Core Processor` is `epyc 7763`."""
    return " ".join(_NOISE.sub(" ", name).lower().split())


PROCESSORS = {
    _words(name): Processor(name, int(cores), float(ghz), int(channels), int(mt_per_s))
    for line in _TABLE.strip().splitlines()
    for name, cores, ghz, channels, mt_per_s in [line.rsplit(maxsplit=4)]
}


def processor(name: str) -> Processor:
    """The processor of this name, also as /proc/cpuinfo writes it. Raises ValueError with the nearest known names."""
    words = _words(name)
    if (found := PROCESSORS.get(words) or _only(words)) is not None:
        return found
    near = difflib.get_close_matches(words, PROCESSORS, n=3, cutoff=0.7)
    hint = f"; similar ones are {', '.join(PROCESSORS[own].name for own in near)}" if near else ""
    raise ValueError(f"{name} is not in ggpipe's table{hint}: give cores and memory_gb_per_s instead")


def _only(words: str) -> Processor | None:
    """The only processor whose name ends with these words, such as `7763` or `gold 6148`."""
    found = [own for key, own in PROCESSORS.items() if words and key.endswith(f" {words}")]
    return found[0] if len(found) == 1 else None
