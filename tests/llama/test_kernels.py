"""Which of ggpipe's own kernels a CPU gets, and that those for AVX-VNNI give the bits of those for AVX2."""

import platform
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from support.commands import HANG_S, ROOT
from support.weight_types import FewBits

from ggpipe.llama import machine
from ggpipe.llama.libllama import native

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="all of them are for x86-64")

REPACKED = (Type.Q4_0, Type.Q4_K, Type.IQ4_NL, Type.MXFP4, Type.Q2_K)
"""Types that ggml repacks: all but the last one on any CPU with AVX2. Streamed weights remain as in the file."""
PLAIN = (
    Type.Q8_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q3_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS, Type.NVFP4, *FewBits,
    Type.TQ1_0, Type.TQ2_0,
)  # fmt: skip
GRIDS = (Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.IQ1_S, Type.IQ1_M)
"""Types whose numbers come from tables."""
OF_EACH_KIND = (Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q3_K, Type.Q2_K, Type.NVFP4, FewBits.Q1_0, Type.TQ1_0)
"""Blocks of 32 and of 256 numbers, sums of pairs, units of 16 numbers, and bytes with several columns."""
AVX2 = ["avx2"]
AVX_VNNI = ["avx2", "avx_vnni"]  # Intel Core since the 12th generation
AVX512 = ["avx2", "avx512"]  # Intel Skylake-SP
AVX512_VNNI = ["avx2", "avx512", "avx512_vnni"]  # Intel Cascade Lake
AVX512_BF16 = ["avx2", "avx512", "avx512_vnni", "avx512_bf16"]  # AMD Zen 4
ALL = ["avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16"]  # Intel Sapphire Rapids, AMD Zen 5


@pytest.mark.parametrize(
    ("features", "products", "attention"),
    [
        ([], "", ""),
        (AVX2, "AVX2", "AVX2"),
        (AVX_VNNI, "AVX-VNNI", "AVX2"),
        (AVX512, "AVX2", "AVX-512"),
        (AVX512_VNNI, "AVX-512 VNNI", "AVX-512"),
        (ALL, "AVX-512 VNNI", "AVX-512"),
    ],
)
def test_quantized_weights(features: list[str], products: str, attention: str) -> None:
    if products == "AVX-VNNI" and not _compiler_knows_avx_vnni():
        products = "AVX2"
    for kind in (*REPACKED, *PLAIN):
        assert native.kernel_names(kind, False, features) == (products, attention)
        assert native.kernel_names(kind, True, features) == (products if kind in REPACKED else "", attention)


@pytest.mark.parametrize(
    ("features", "products"),
    [
        (AVX2, "AVX2"),
        (AVX_VNNI, "AVX-VNNI"),
        (AVX512, "AVX-512"),
        (AVX512_VNNI, "AVX-512 VNNI"),
        (ALL, "AVX-512 VNNI"),
    ],
)
def test_grids(features: list[str], products: str) -> None:
    if products == "AVX-VNNI" and not _compiler_knows_avx_vnni():
        products = "AVX2"
    for kind in GRIDS:
        assert native.kernel_names(kind, False, features)[0] == products
        assert native.kernel_names(kind, True, features)[0] == ""


def test_floats() -> None:
    for features in (AVX2, AVX_VNNI, AVX512, AVX512_VNNI, AVX512_BF16, ALL):
        expected = "AVX-512" if "avx512" in features else "AVX2"
        assert native.kernel_names(Type.F32, False, features)[0] == expected
        assert native.kernel_names(Type.F16, False, features)[0] == expected
        dots = "AVX-512 BF16" if "avx512_bf16" in features else expected
        assert native.kernel_names(Type.BF16, False, features)[0] == dots


def test_types_without_kernels() -> None:
    assert native.kernel_names(Type.Q8_K, False, ALL)[0] == ""
    with pytest.raises(RuntimeError, match="unknown CPU feature: mmx"):
        native.kernel_names(Type.Q8_0, False, ["mmx"])


def _compiler_knows_avx_vnni() -> bool:
    return native.kernel_names(Type.Q8_0, False, AVX_VNNI)[0] == "AVX-VNNI"


@pytest.mark.skipif(
    not {"AVX2", "FMA", "F16C"} <= set(machine.cpu_features()) or not shutil.which("c++"),
    reason="needs a CPU with AVX2, and a C++ compiler",
)
def test_avx_vnni_gives_the_bits_of_avx2(tmp_path: Path, full: bool) -> None:
    """For numbers at random and for the highest sums; also where a CPU lacks AVX-VNNI's instructions. Without `full`,
    for one type of each kind of kernel."""
    spec = find_spec("llama_cpp")
    assert spec
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    names = ("avx2.cpp", "grids.cpp", "grids_avx2.cpp")
    sources = [ROOT / "tests" / "llama" / "kernels.cpp", *(ROOT / "native" / name for name in names)]
    flags = ["-std=c++17", "-Og", "-Wno-psabi", f"-I{ROOT / 'native'}", f"-I{package.parent / 'include'}"]
    kinds, grids = ((*REPACKED, *PLAIN), GRIDS) if full else (OF_EACH_KIND, (Type.IQ3_S,))
    repacked = [kind for kind in kinds if kind in REPACKED]
    for name, some in (("FORMATS", kinds), ("REPACKED_FORMATS", repacked), ("GRID_FORMATS", grids)):
        flags.append(f"-DGGPIPE_FOR_{name}(DO)={' '.join(f'DO({kind.name})' for kind in some)}")
    libraries = [f"-L{package / 'lib'}", f"-Wl,-rpath,{package / 'lib'}", "-lggml-base"]
    command = ["c++", *flags, *map(str, sources), *libraries, "-o", str(tmp_path / "kernels")]
    subprocess.run(command, check=True, timeout=HANG_S)
    done = subprocess.run([tmp_path / "kernels"], capture_output=True, text=True, check=True, timeout=HANG_S)
    lines = done.stdout.splitlines()
    assert len(lines) == len(kinds) + len(repacked) + len(grids)
    assert [line for line in lines if not line.endswith(": equal")] == []
