"""The work of attention, as cluster files describe it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.tables import ModelTable
from ggpipe.core.row_work import Attention

TARGET = {"layers": 80, "weights_gb": 42.5, "parameters_b": 70.6, "width": 8192, "kv_kb": 328}


def shape(**more: Any) -> ModelShape:
    return msgspec.convert({**TARGET, **more}, ModelTable).shape("target")


def test_heads_are_as_wide_as_the_model_unless_said() -> None:
    assert shape().layer_attention == (Attention(cell=4 * 8192),) * 80
    assert shape(attention_width=4096).layer_attention == (Attention(cell=4 * 4096),) * 80


def test_windows() -> None:
    """In some layers, evenly spread, or in all."""
    some = shape(window=128, window_layers=20, index_width=512).layer_attention
    within = Attention(cell=4 * 8192, most_cells=128, index=2 * 512)
    assert [layer == within for layer in some[:8]] == [False, False, False, True] * 2
    assert some.count(within) == 20
    assert shape(window=128).layer_attention == (Attention(cell=4 * 8192, most_cells=128),) * 80


def test_latent_attention() -> None:
    """Sparse attention never expands the vectors."""
    (latent,) = {*shape(kv_heads=128, latent_kv=True).layer_attention}
    assert latent.cell == pytest.approx(2 * 128 * (2050 + 2050 * 512 / 576))
    assert 0 < latent.long_cell < latent.cell < latent.expansion
    (sparse,) = {*shape(kv_heads=128, latent_kv=True, window=2048).layer_attention}
    assert sparse == replace(latent.never_long(), most_cells=2048)


def test_parts_divide_attention() -> None:
    whole = shape()
    assert whole.part(0.25).attention((0, 4)) == (Attention(cell=4 * 8192),)
    assert replace(whole, divides_attention=False).part(0.25).attention((0, 4)) == whole.attention((0, 4))


def test_layers_with_states() -> None:
    """In place of attention, evenly spread, or besides it."""
    mixed = shape(state_mb=60, state_layers=60)
    has_state = [bool(n_bytes) for n_bytes in mixed.layer_state_bytes]
    assert has_state[:8] == [False, True, True, True] * 2
    assert [cell == 0 for cell in mixed.layer_cell_bytes] == has_state
    assert [attention.cell == 0 for attention in mixed.layer_attention] == has_state
    assert mixed.cell_bytes((0, 80)) == pytest.approx(shape().cell_bytes((0, 80)))
    assert mixed.state_traffic((0, 80)) == pytest.approx(2 * 60e6)
    both = shape(state_mb=60)
    assert both.layer_attention == shape().layer_attention
    assert both.state_traffic((0, 80)) == pytest.approx(2 * 60e6, rel=1e-6)
    assert both.is_recurrent
    assert not shape().is_recurrent


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"state_layers": 60}, "state_mb missing: state_layers needs it"),
        ({"state_mb": 60, "state_layers": 80}, r"state_layers must be below layers \(80\), got 80"),
    ],
)
def test_states_that_make_no_sense(more: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        shape(**more)
