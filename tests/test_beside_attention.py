"""What clients import beside attention: names, argument orders and defaults of upstream 2.8.3."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from test_api import assert_signature

MODULES = {  # what clients import from each
    "losses.cross_entropy": ["CrossEntropyLoss"],  # InternLM, HyenaDNA
    "ops.triton.cross_entropy": ["CrossEntropyLoss", "cross_entropy_loss"],  # verl, OLMo, axolotl
    "utils.distributed": [  # OpenRLHF, HyenaDNA, LoLCATs
        "all_gather",
        "all_gather_raw",
        "all_reduce",
        "all_reduce_raw",
        "allreduce_sequence_parallel_grad",
        "get_dim_for_local_rank",
        "reduce_scatter",
        "reduce_scatter_raw",
        "sync_shared_params",
    ],
    "ops.triton.layer_norm": ["RMSNorm", "layer_norm_fn", "rms_norm_fn"],  # nanotron, hnet
    "ops.rms_norm": [  # axolotl, contrastors, Galvatron
        "DropoutAddRMSNorm",
        "RMSNorm",
        "dropout_add_rms_norm",
        "rms_norm",
    ],
    "ops.layer_norm": [  # VAR, Galvatron, MosaicML's examples
        "DropoutAddLayerNorm",
        "dropout_add_layer_norm",
        "layer_norm",
    ],
    "ops.activations": [  # OmniGen2, hnet, contrastors, gpt-neox; copies of upstream's MLPs
        "bias_gelu",
        "bias_gelu_back",
        "bias_gelu_impl",
        "fast_gelu_impl",
        "gelu_bwd",
        "gelu_fwd",
        "relu_bwd",
        "sqrelu_bwd",
        "sqrelu_fwd",
        "swiglu",
        "swiglu_bwd",
        "swiglu_fwd",
    ],
    "utils.generation": ["GenerationMixin", "InferenceParams", "sample"],  # H-Net, Caduceus
}
LOSS = (
    "label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, {}inplace_backward=False, "
    "process_group=None"
)
NORM = (
    "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, "
    "rowscale=None, prenorm=False, residual_in_fp32=False, zero_centered_weight=False, {}"
    "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None"
)
DROPOUT_ADD = (
    "x0, residual, weight, bias, dropout_p, epsilon, rowscale=None, layerscale=None, "
    "prenorm=False, residual_in_fp32=False, return_dropout_mask=False"
)
DROPOUT_ADD_MODULE = (
    "hidden_size, prenorm=False, p=0.0, eps=1e-5, residual_in_fp32=False, device=None, dtype=None"
)
SIGNATURES = {
    "losses.cross_entropy.CrossEntropyLoss": (
        f"ignore_index=-100, reduction='mean', {LOSS.format('')}, return_z_loss=False"
    ),
    "losses.cross_entropy.CrossEntropyLoss.forward": "self, input, target, precomputed_lse=None",
    "ops.triton.cross_entropy.cross_entropy_loss": (
        f"logits, labels, precomputed_lse=None, {LOSS.format('ignore_index=-100, ')}"
    ),
    "ops.triton.layer_norm.layer_norm_fn": NORM.format("is_rms_norm=False, "),
    "ops.triton.layer_norm.rms_norm_fn": NORM.format(""),
    "ops.triton.layer_norm.RMSNorm": (
        "hidden_size, eps=1e-5, dropout_p=0.0, zero_centered_weight=False, device=None, dtype=None"
    ),
    "ops.triton.layer_norm.RMSNorm.forward": (
        "self, x, residual=None, prenorm=False, residual_in_fp32=False"
    ),
    "ops.rms_norm.rms_norm": "x, weight, epsilon",
    "ops.rms_norm.RMSNorm": "hidden_size, eps=1e-5, device=None, dtype=None",
    "ops.rms_norm.dropout_add_rms_norm": DROPOUT_ADD,
    "ops.rms_norm.DropoutAddRMSNorm": DROPOUT_ADD_MODULE,
    "ops.layer_norm.layer_norm": "x, weight, bias, epsilon",
    "ops.layer_norm.dropout_add_layer_norm": DROPOUT_ADD,
    "ops.layer_norm.DropoutAddLayerNorm": DROPOUT_ADD_MODULE,
    "ops.layer_norm.DropoutAddLayerNorm.forward": "self, x0, residual=None",
    "ops.activations.bias_gelu_impl": "y, bias",
    "ops.activations.gelu_bwd": "g, x",
    "ops.activations.relu_bwd": "g, x",
    "ops.activations.sqrelu_bwd": "g, x",
    "ops.activations.swiglu_bwd": "x, y, g",
    "utils.distributed.all_gather_raw": "input_, process_group, async_op=False",
    "utils.distributed.all_reduce_raw": "input_, process_group, async_op=False",
    "utils.distributed.reduce_scatter_raw": "input_, process_group, async_op=False",
    "utils.distributed.sync_shared_params": "model, process_group",
    "utils.distributed.get_dim_for_local_rank": "dim, world_size, local_rank, multiple_of=1",
}
EXTENSIONS = {"layerscale", "is_rms_norm"}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in MODULES for name in MODULES[module]]
)
def test_import(module: str, name: str) -> None:
    assert callable(getattr(importlib.import_module(f"flash_attn.{module}"), name))


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    module = next(module for module in MODULES if path.startswith(f"{module}."))
    function: Any = importlib.import_module(f"flash_attn.{module}")
    for name in path.removeprefix(f"{module}.").split("."):
        function = getattr(function, name)
    assert_signature(function, SIGNATURES[path], EXTENSIONS)


def test_call_sequences_of_clients() -> None:
    """As written in verl, nanotron, VAR and OmniGen2."""
    from flash_attn.ops.activations import swiglu
    from flash_attn.ops.layer_norm import dropout_add_layer_norm
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    logits, labels = torch.randn(4, 9, dtype=torch.bfloat16), torch.randint(9, (4,))
    output = cross_entropy_loss(logits, labels, inplace_backward=True)
    assert isinstance(output, tuple)
    expected = logits.float().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(-output[0], expected)

    x, residual, weight = torch.randn(3, 2, 8)
    weight = weight[0]
    y, total = layer_norm_fn(
        x,
        weight,
        None,
        residual=residual,
        eps=1e-6,
        dropout_p=0.0,
        prenorm=True,
        residual_in_fp32=False,
        is_rms_norm=True,
        return_dropout_mask=False,
    )
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(total, (8,), weight, 1e-6))

    y, total = dropout_add_layer_norm(x, residual, weight, weight, 0.0, 1e-6, prenorm=True)
    torch.testing.assert_close(
        y, torch.nn.functional.layer_norm(x + residual, (8,), weight, weight, 1e-6)
    )
    torch.testing.assert_close(swiglu(x, y), torch.nn.functional.silu(x) * y)
