"""Calls of clients that do not run on a CPU, with their layouts and keywords.

Each test is named after a client, whose calls it makes in its own words; the client is not needed.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from clients.client_helpers import HEADDIM, HEADS, SEQLEN, assert_as_good_as_eager, whole
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

SCALE = HEADDIM**-0.5
Results = list[Tensor]


@pytest.fixture
def problem() -> tuple[Results, Results, Results]:
    """q, k, v and dout, and causal attention with its gradients in bfloat16 and in float32."""
    inputs = list(torch.randn(4, 1, SEQLEN, HEADS, HEADDIM).bfloat16())
    return inputs, whole(*inputs), whole(*(x.float() for x in inputs))


def compare(flash: Results, eager: Results, exact: Results) -> None:
    for name, x, y, z in zip(("out", "dq", "dk", "dv"), flash, eager, exact, strict=True):
        assert_as_good_as_eager(x.reshape(y.shape), y, z, name)


def test_transformer_engine_private(problem: tuple[Results, Results, Results]) -> None:
    """TransformerEngine's context parallelism: keywords, and gradients into its own tensors."""
    (q, k, v, dout), eager, exact = problem
    window = {"window_size_left": -1, "window_size_right": 0, "softcap": 0.0, "alibi_slopes": None}
    common = {"dropout_p": 0.0, "softmax_scale": SCALE, "causal": True, **window}
    out, lse, _, rng_state = _flash_attn_forward(q, k, v, return_softmax=False, **common)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    more = {"dq": dq, "dk": dk, "dv": dv, "deterministic": False, "rng_state": rng_state}
    _flash_attn_backward(dout, q, k, v, out, lse, **more, **common)
    compare([out, dq, dk, dv], eager, exact)


def test_fla_private_varlen(problem: tuple[Results, Results, Results]) -> None:
    """fla's MoBA: the varlen pair by keywords."""
    (q, k, v, dout), eager, exact = ([x[0] for x in y] for y in problem)
    lengths = torch.tensor([0, SEQLEN], dtype=torch.int32)
    common = {"softmax_scale": SCALE, "causal": True, "dropout_p": 0.0}
    common |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    common |= {"max_seqlen_q": SEQLEN, "max_seqlen_k": SEQLEN}
    out, lse, *_ = _flash_attn_varlen_forward(q=q, k=k, v=v, **common)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    window = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0}
    _flash_attn_varlen_backward(
        dout=dout,
        q=q,
        k=k,
        v=v,
        out=out,
        softmax_lse=lse,
        dq=dq,
        dk=dk,
        dv=dv,
        alibi_slopes=None,
        deterministic=True,
        **window,
        **common,
    )
    compare([out, dq, dk, dv], eager, exact)


@pytest.mark.parametrize("place", ["flash_attn_2_cuda", "flash_attn.flash_attn_interface"])
def test_xformers_vortex_tgi(problem: tuple[Results, Results, Results], place: str) -> None:
    """The extension's functions by position: xformers, MSLK, vortex and TGI."""
    (q, k, v, dout), eager, exact = problem
    module = importlib.import_module(place)
    gpu = getattr(module, "flash_attn_gpu", module)
    mask = (True, -1, -1, 0.0)
    out, lse, _, rng_state = gpu.fwd(q, k, v, None, None, 0.0, SCALE, *mask, False, None)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    more = (dq, dk, dv, None, 0.0, SCALE, *mask, False, None, rng_state)
    gpu.bwd(dout, q, k, v, out, lse, *more)
    compare([out, dq, dk, dv], eager, exact)


def test_olmo(problem: tuple[Results, Results, Results]) -> None:
    """OLMo: (batch, heads, seqlen, headdim) transposed on the way in and out."""
    (*qkv, dout), eager, exact = problem
    inputs = [x.transpose(1, 2).contiguous().requires_grad_() for x in qkv]
    out = flash_attn_func(*(x.transpose(1, 2) for x in inputs), dropout_p=0.0, causal=True)
    gradients = torch.autograd.grad(out, inputs, dout)
    compare([out, *(x.transpose(1, 2) for x in gradients)], eager, exact)


def test_llm_foundry(problem: tuple[Results, Results, Results]) -> None:
    """llm-foundry, one key head: unpadded rows (tokens, heads * headdim), expanded keys."""
    (q, k, v, dout), _, _ = problem
    k, v = (x[:, :, :1] for x in (k, v))

    def expanded(*inputs: Tensor) -> Results:
        q, k, v, dout = (x.detach().requires_grad_() for x in inputs)
        every = (x.expand(-1, -1, HEADS, -1) for x in (k, v))
        found = whole(q, *every, dout)
        return [*found[:2], *(x.sum(2, keepdim=True) for x in found[2:])]

    eager, exact = expanded(q, k, v, dout), expanded(*(x.float() for x in (q, k, v, dout)))
    mask = torch.ones(1, SEQLEN, dtype=torch.bool)
    inputs = [x.flatten(2).requires_grad_() for x in (q, k, v)]
    _, indices, lengths, longest, _ = unpad_input(inputs[0], mask)
    rows = [index_first_axis(x.flatten(0, 1), indices) for x in inputs]
    q, k, v = (x.unflatten(1, (-1, HEADDIM)) for x in rows)
    k, v = (x.expand(-1, HEADS, HEADDIM) for x in (k, v))
    out = flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=lengths,
        cu_seqlens_k=lengths,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        dropout_p=0.0,
        softmax_scale=SCALE,
        causal=True,
        return_attn_probs=False,
        window_size=(-1, -1),
    )
    out = pad_input(out.flatten(1), indices, 1, SEQLEN)
    gradients = torch.autograd.grad(out, inputs, dout.flatten(2))
    compare([out, *gradients], eager, exact)


@torch.no_grad()
def test_megatron_decode(problem: tuple[Results, Results, Results]) -> None:
    """Megatron-LM: (seqlen, batch, heads, headdim) caches permuted, one token at a time."""
    (q, k, v, _), eager, exact = problem
    caches = torch.zeros(2, SEQLEN, 1, HEADS, HEADDIM).bfloat16()
    found = []
    for i in range(SEQLEN):
        token = [x[:, i : i + 1].transpose(0, 1) for x in (q, k, v)]
        new_q, new_k, new_v = (x.permute(1, 0, 2, 3) for x in token)
        k_cache, v_cache = (x.permute(1, 0, 2, 3) for x in caches)
        found.append(
            flash_attn_with_kvcache(
                q=new_q,
                k_cache=k_cache,
                v_cache=v_cache,
                k=new_k,
                v=new_v,
                rotary_cos=None,
                rotary_sin=None,
                cache_seqlens=i,
                rotary_interleaved=False,
            )
        )
    assert_as_good_as_eager(torch.cat(found, 1), eager[0], exact[0])


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy(z_loss: float) -> None:
    """verl, OpenRLHF, OLMo: losses a row, log-probabilities as their negatives, and the z-loss."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    logits = torch.randn(11, 37, requires_grad=True)
    labels = torch.randint(37, (11,))
    labels[3] = -100
    loss, z = cross_entropy_loss(
        logits,
        labels,
        label_smoothing=0.0,
        logit_scale=1.0,
        lse_square_scale=z_loss,
        inplace_backward=False,
        process_group=None,
        ignore_index=-100,
    )
    exact = logits.detach().double().requires_grad_()
    z_exact = (z_loss * exact.logsumexp(-1) ** 2).masked_fill(labels == -100, 0)
    expected = torch.nn.functional.cross_entropy(exact, labels, reduction="none") + z_exact
    # Sums of 37 float32 terms: 37 half units in the last place, of values up to 10.
    bound = {"atol": 37 * 2**-24 * 10, "rtol": 0.0}
    torch.testing.assert_close(loss.double(), expected, **bound)
    torch.testing.assert_close(z.double(), z_exact, **bound)
    direction = torch.randn(11)
    loss.backward(direction)
    expected.backward(direction.double())
    torch.testing.assert_close(logits.grad.double(), exact.grad, **bound)
