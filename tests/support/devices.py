"""libllama's own tensor parallelism, in one process: devices that are all the CPU, each with memory of its own.

    with Reference(path, 256, model=tensor_parallel((3, 1)), context={"flash_attn_type": 1}) as reference:

Nothing of ours is in it. A device is a copy of the CPU's table of functions with a buffer type of its own, which is no
host memory: otherwise ggml's scheduler would read past the meta device that libllama puts over them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ggpipe.llama.libllama import lib
from support.reference import Fields, ggml

_CPU, _TENSOR = 0, 3  # of ggml_backend_dev_type and of llama_split_mode
_DEVICE_WORDS, _INIT, _GET_TYPE, _SUPPORTS_TYPE = 17, 5, 6, 10  # ggml_backend_device: 15 functions, registry, context
_TYPE_WORDS, _IS_HOST, _DEVICE = 8, 5, 6  # ggml_backend_buffer_type: 6 functions, device, context

_Words = ctypes.POINTER(ctypes.c_void_p)
_Init = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_GetType = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_IsHost = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
_Supports = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)

_keep: list[object] = []
"""ggml never frees a meta device, so what it points to stays."""


def tensor_parallel(shares: Sequence[float]) -> Fields:
    """Fields of llama_model_params: a device for each share, of one thread each."""
    devices = (ctypes.c_void_p * (len(shares) + 1))(*(_device() for _ in shares), None)
    split = (ctypes.c_float * lib.llama_max_devices())(*shares)
    _keep.extend((devices, split))
    return {
        "devices": ctypes.cast(devices, ctypes.c_void_p),
        "tensor_split": split,
        "split_mode": _TENSOR,
        "n_gpu_layers": 999,
        "load_mode": 0,
        "use_extra_bufts": False,
    }


def divides(path: Path) -> bool:
    """libllama's own tensor parallelism takes this model's architecture."""
    params = lib.llama_model_default_params()
    for name, value in tensor_parallel((1, 1)).items():
        setattr(params, name, value)
    params.vocab_only = True
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if model:
        lib.llama_model_free(model)
    return bool(model)


def _device() -> int:
    cpu = ggml().ggml_backend_dev_by_type(_CPU)
    registry = ggml().ggml_backend_dev_backend_reg(cpu)
    address = ggml().ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
    set_threads = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)
    of_cpu = ctypes.cast(cpu, _Words)
    device = (ctypes.c_void_p * _DEVICE_WORDS)(*of_cpu[:_DEVICE_WORDS])
    memory = (ctypes.c_void_p * _TYPE_WORDS)(*ctypes.cast(_GetType(_at(of_cpu, _GET_TYPE))(cpu), _Words)[:_TYPE_WORDS])
    memory_address = ctypes.addressof(memory)
    init = _Init(_at(of_cpu, _INIT))

    def of_one_thread(_device: int, params: bytes | None) -> Any:
        backend = init(cpu, params)
        set_threads(backend, 1)
        return backend

    functions = {
        _INIT: _Init(of_one_thread),
        _GET_TYPE: _GetType(lambda _: memory_address),
        _SUPPORTS_TYPE: _Supports(lambda _, other: other == memory_address),
    }
    for place, function in functions.items():
        device[place] = ctypes.cast(function, ctypes.c_void_p).value
    no_host = _IsHost(lambda _: False)
    memory[_IS_HOST] = ctypes.cast(no_host, ctypes.c_void_p).value
    memory[_DEVICE] = ctypes.addressof(device)
    _keep.extend((device, memory, functions, no_host))
    return ctypes.addressof(device)


def _at(table: Any, place: int) -> int:
    return int(table[place])
