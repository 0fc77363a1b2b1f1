"""Tensors of a layer that `train.remat_save` and `train.remat_offload` may name, in order of appearance."""

from __future__ import annotations

from collections.abc import Mapping

REMAT_TENSORS: Mapping[str, str] = {
    "layer_input": "the residual stream as the layer receives it",
    "query": "queries after RoPE",
    "key": "keys after RoPE",
    "value": "values",
    "attention_out": "what attention mixed, before its output projection",
    "attention_projected": "after the output projection",
    "mlp_gate": "before the activation of the MLP or expert",
    "mlp_up": "what the activation is multiplied by",
    "mlp_out": "the output of the MLP or of the mixed experts",
}
