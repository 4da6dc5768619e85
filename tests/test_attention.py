"""Forward and backward of the dense and varlen functions, each compared with the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import (
    APART,
    DROPOUT_SEED,
    DTYPES,
    LAYOUTS,
    NAN,
    OPTIONS,
    assert_guard_intact,
    call,
    check,
    covered,
    dense,
    dtype_name,
    guarded,
    in_pages,
    int32,
    kernels_forced,
    layout_of,
    options_of,
    randn,
    run,
    varlen,
    with_dropout_mask,
)
from oracle import Storage, assert_matches_oracle

import flash_attn
from flash_attn._backends import cuda

# One off, and on, the edges of tiles of 64 and 128; primes; one row.
EDGES = [1, 2, 17, 63, 64, 65, 127, 128, 129]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(device, options, dtype):
    check(dense(2, 37, 53, 4, 2, dtype=dtype, device=device, **OPTIONS[options](2, 4, device)))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("options", OPTIONS)
def test_varlen_options(device, options, dtype):
    seqlens_q, seqlens_k = [19, 1, 33, 0, 7], [19, 25, 12, 6, 0]
    options = OPTIONS[options](5, 4, device)
    check(varlen(seqlens_q, seqlens_k, 4, 2, dtype=dtype, device=device, **options))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen_q", EDGES)
def test_seqlens(device, seqlen_q, causal):
    for seqlen_k in (1, 17, seqlen_q - 1, seqlen_q, seqlen_q + 1, 129):
        problem = dense(1, seqlen_q, seqlen_k, dtype=torch.bfloat16, device=device, causal=causal)
        check(problem)


@pytest.mark.parametrize("left", [-1, 0, 1, 5, 126])  # 1 and 126 end on the edge of a tile
@pytest.mark.parametrize("right", [-1, 0, 1, 70])
@pytest.mark.parametrize("seqlens", [(129, 200), (200, 129), (260, 260)], ids=str)
def test_windows_across_tiles(device, seqlens, left, right):
    check(dense(1, *seqlens, 1, 1, 16, window_size=(left, right), device=device))


@pytest.mark.parametrize("left, right", [(5, -1), (5, 3), (-1, 3), (150, 0)])
def test_varlen_windows_across_tiles(device, left, right):
    """Sequences whose diagonals cross different tiles."""
    seqlens_q, seqlens_k = [300, 100, 5, 260], [200, 290, 300, 130]
    check(varlen(seqlens_q, seqlens_k, 1, 1, 16, window_size=(left, right), device=device))


@pytest.mark.parametrize("headdim, headdim_v", [(1, 1), (8, 24), (40, 64), (64, 40), (128, 128)])
def test_head_dims(device, headdim, headdim_v):
    for dtype in covered([torch.bfloat16, torch.float32]):
        check(dense(headdim=headdim, headdim_v=headdim_v, dtype=dtype, device=device, causal=True))


@pytest.mark.parametrize("headdim, headdim_v", [(192, 128), (256, 256), (264, 264)])
def test_large_head_dims(device, headdim, headdim_v):
    check(dense(1, 20, 30, 2, 1, headdim, headdim_v, torch.bfloat16, device, causal=True))


@pytest.mark.parametrize("nheads, nheads_kv", [(1, 1), (5, 5), (4, 2), (6, 2), (7, 1)])
def test_head_groups(device, nheads, nheads_kv):
    options = OPTIONS["everything"](2, nheads, device)
    check(dense(2, 20, 30, nheads, nheads_kv, dtype=torch.float16, device=device, **options))
    check(varlen([9, 14], [17, 14], nheads, nheads_kv, device=device, **options))


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0},
        {"seqlen_q": 0},
        {"seqlen_k": 0},
        {"seqlen_q": 0, "seqlen_k": 0},
        {"nheads": 0, "nheads_kv": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", ["plain", "everything"])
def test_empty(device, sizes, options):
    sizes = {"batch": 2, "nheads": 2} | sizes
    options = OPTIONS[options](sizes["batch"], sizes["nheads"], device)
    check(dense(**sizes, device=device, **options))


@pytest.mark.parametrize(
    "seqlens_q, seqlens_k", [([], []), ([0], [0]), ([0, 0], [3, 0]), ([3, 0], [0, 0])], ids=str
)
def test_varlen_empty(device, seqlens_q, seqlens_k):
    check(varlen(seqlens_q, seqlens_k, device=device))
    check(varlen(seqlens_q, seqlens_k, device=device, slack=0, causal=True))


def test_varlen_rows_before_the_first_sequence(device):
    """Rows of no sequence may also stand before all of them."""
    problem = varlen([9, 14], [17, 14], device=device, causal=True)
    problem.q[:2], problem.k[:3], problem.v[:3] = NAN, NAN, NAN
    storage = Storage(cu_seqlens=int32([3, 17, 31], device))
    check(replace(problem, cu_seqlens_q=int32([2, 9, 23], device), storage=storage))


def test_varlen_many_sequences(device):
    seqlens_q = [1, 129, 64, 7, 2, 0, 65, 31]
    seqlens_k = [130, 129, 1, 0, 64, 5, 127, 31]
    check(varlen(seqlens_q, seqlens_k, 2, 1, 16, device=device, causal=True))


@pytest.mark.parametrize("options", ["plain", "everything"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
def test_strides(device, options, dtype):
    options = OPTIONS[options](2, 4, device)
    seqlen, nheads, headdim = 29, 4, 16
    bhsd = [randn(2, nheads, seqlen, headdim, dtype=dtype, device=device) for _ in range(3)]
    packed = randn(2, seqlen, 3, nheads, headdim, dtype=dtype, device=device)
    one_kv_head = [randn(2, seqlen, 1, headdim, dtype=dtype, device=device) for _ in range(2)]
    around = dense(2, seqlen, seqlen, nheads, nheads, headdim, dtype=dtype, device=device)
    for q, k, v in (
        [x.transpose(1, 2) for x in bhsd],
        packed.unbind(2),
        [bhsd[0].transpose(1, 2), *(x.expand(-1, -1, nheads, -1) for x in one_kv_head)],
        [guarded(x) for x in (around.q, around.k, around.v)],
    ):
        check(replace(around, q=q, k=k, v=v, **options))


def test_varlen_strides(device):
    problem = varlen([9, 14], [17, 14], 4, 4, 16, device=device, causal=True)
    q, k, v = (guarded(x) for x in (problem.q, problem.k, problem.v))
    check(replace(problem, q=q, k=k, v=v))
    packed = randn(31, 3, 4, 16, dtype=problem.q.dtype, device=device)
    q, k, v = packed.unbind(1)
    check(replace(problem, q=q, k=k, v=v))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_functions_equal_the_plain_ones(device, layout):
    options = OPTIONS["everything"](2, 2, device)
    if layout == "dense":
        problem = dense(dtype=torch.bfloat16, device=device, **options)
    else:
        problem = varlen([20, 13], [20, 13], dtype=torch.bfloat16, device=device, **options)
    results, upstream = run(problem, deterministic=True)
    heads = problem.q.dim() - 2
    names = ("flash_attn_qkvpacked_func", "flash_attn_kvpacked_func")
    layouts = (), ()
    if problem.cu_seqlens_q is not None:
        names = ("flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func")
        layout = layout_of(problem)
        layouts = (layout[0], layout[2]), layout
    more = options_of(problem) | {"return_attn_probs": True, "deterministic": True}
    upstream = upstream["dout"], upstream["dlse"]

    qkv = torch.stack([problem.q, problem.k, problem.v], heads).requires_grad_()
    torch.manual_seed(DROPOUT_SEED)
    out, lse, _ = getattr(flash_attn, names[0])(qkv, *layouts[0], **more)
    (dqkv,) = torch.autograd.grad((out, lse), qkv, upstream)

    q, kv = problem.q.requires_grad_(), qkv.detach().narrow(heads, 1, 2).requires_grad_()
    torch.manual_seed(DROPOUT_SEED)
    out_kv, lse_kv, _ = getattr(flash_attn, names[1])(q, kv, *layouts[1], **more)
    dq, dkv = torch.autograd.grad((out_kv, lse_kv), (q, kv), upstream)

    for got, name in (
        (out, "out"),
        (lse, "lse"),
        (dqkv.select(heads, 0), "dq"),
        (dqkv.select(heads, 1), "dk"),
        (dqkv.select(heads, 2), "dv"),
        (out_kv, "out"),
        (lse_kv, "lse"),
        (dq, "dq"),
        (dkv.select(heads, 0), "dk"),
        (dkv.select(heads, 1), "dv"),
    ):
        assert torch.equal(got, results[name]), name


def test_bare_tensor_by_default(device):
    for problem in (dense(device=device), varlen([20, 13], [20, 13], device=device)):
        out = call(problem)
        assert torch.equal(out, call(problem, return_attn_probs=True)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_lse_dtype(device, dtype):
    lse = call(dense(dtype=dtype, device=device), return_attn_probs=True)[1]
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_probabilities_are_empty_without_dropout(device):
    assert call(dense(device=device), return_attn_probs=True)[2].numel() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_probabilities(device, layout, dtype):
    """S_dmask holds P before dropout, with a negative sign where dropout removed it."""
    problem = LAYOUTS[layout](
        dtype=dtype, device=device, dropout_p=0.3, causal=True, s_aux=torch.ones(2, device=device)
    )
    problem = with_dropout_mask(problem)
    torch.manual_seed(DROPOUT_SEED)
    signed = call(problem, return_attn_probs=True)[2]
    torch.manual_seed(DROPOUT_SEED)
    tracked = replace(problem, q=problem.q.clone().requires_grad_())
    assert torch.equal(call(tracked, return_attn_probs=True)[2], signed)
    if problem.cu_seqlens_q is None:
        assert signed.shape == (2, 2, 128, 128)
    else:
        assert signed.shape == (2, 2, 256, 256)
    exact = problem.to(torch.float64)
    for b, rows, keys in exact.sequences():
        _, _, p = exact.attend(b, exact.q[rows], exact.k[keys], exact.v[keys])
        got = signed[b, :, : p.shape[1], : p.shape[2]].cpu()
        torch.testing.assert_close(got.abs().double(), p, rtol=1e-2, atol=1e-5)
        kept = exact.keep[b, :, : p.shape[1], : p.shape[2]]
        assert ((got > 0) == kept)[got != 0].all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_probabilities_have_no_gradient(device, layout):
    problem = LAYOUTS[layout](device=device, dropout_p=0.2)
    problem.q.requires_grad_()
    out, lse, probs = call(problem, return_attn_probs=True)
    assert probs.numel() and [x.requires_grad for x in (out, lse, probs)] == [True, True, False]


def test_dropout_follows_the_seed(device):
    problem = dense(dropout_p=0.5, device=device)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs += [call(problem), call(problem)]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[4])


def test_tiny_dropout_drops_nothing(device):
    """diffusers passes 1e-30 to force the training path."""
    problem = dense(device=device)
    out, lse, signed = call(problem, dropout_p=1e-30, return_attn_probs=True)
    assert torch.equal(out, call(problem))
    assert signed.shape == (2, 2, 128, 128) and (signed >= 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_deterministic(device, layout):
    options = OPTIONS["everything"](2, 4, device)
    problem = LAYOUTS[layout](nheads=4, nheads_kv=2, dtype=torch.float16, device=device, **options)
    torch.manual_seed(0)
    first, upstream = run(problem, deterministic=True)
    for _ in range(3):
        again, same = run(problem, deterministic=True)
        assert torch.equal(upstream["dout"].nan_to_num(), same["dout"].nan_to_num())
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


def test_gradients_only_where_asked_for(device):
    problem = dense(device=device)
    q, k, v = problem.q, problem.k.requires_grad_(), problem.v
    call(problem).sum().backward()
    assert q.grad is None and v.grad is None and k.grad is not None


def test_gradient_through_out_alone_and_lse_alone(device):
    problem = dense(2, 20, 30, 4, 2, device=device, causal=True)
    leaves = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse, _ = call(problem, return_attn_probs=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for output, upstream, given in (
        (out, dout, (dout, None)),
        (lse, dlse, (torch.zeros_like(out), dlse)),
    ):
        grads = torch.autograd.grad(output, leaves, upstream, retain_graph=True)
        assert_matches_oracle(dict(zip(("dq", "dk", "dv"), grads, strict=True)), problem, *given)


def test_upstream_gradients_of_any_strides(device):
    problem = dense(device=device)
    q = problem.q.requires_grad_()
    out = call(problem)
    dout = randn(2, 2, 33, 32, dtype=out.dtype, device=device).transpose(1, 2)
    for strided in (dout, dout[..., :1].expand_as(out), out.new_ones(()).expand_as(out)):
        (dq,) = torch.autograd.grad(out, q, strided, retain_graph=True)
        (expected,) = torch.autograd.grad(out, q, strided.contiguous(), retain_graph=True)
        assert torch.equal(dq, expected)


def test_log_sum_exp_of_no_key_has_no_gradient(device):
    """Whatever arrives at it: logaddexp(-inf, -inf) sends NaN."""
    problem = dense(seqlen_q=40, seqlen_k=30, device=device, causal=True)
    leaves = [x.requires_grad_() for x in (problem.q, problem.k)]
    _, lse, _ = call(problem, return_attn_probs=True)
    dlse, sees_none = torch.randn_like(lse), lse == -torch.inf
    assert sees_none.any() and not sees_none.all()
    expected, found = (
        torch.autograd.grad(lse, leaves, dlse.masked_fill(sees_none, x), retain_graph=True)
        for x in (0.0, NAN)
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["s_aux", "alibi_slopes"])
@pytest.mark.parametrize("parts", [1, 3, APART - 3])
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_nan_of_a_head_stays(device, seqlen_q, parts, name):
    """In the results of that head, and in no other's."""
    if parts < 0 and kernels_forced() != "sm90":
        pytest.skip("parts that are no clusters: of sm90")
    problem = dense(seqlen_q=seqlen_q, seqlen_k=300, nheads=2, nheads_kv=2, device=device)
    with cuda.changed_setting("num_splits", parts):
        out = call(replace(problem, **{name: torch.tensor([0.5, NAN], device=device)}))
    assert out[:, :, 1].isnan().all() and out[:, :, 0].isfinite().all()


def test_without_gradient_no_graph(device):
    problem = dense(device=device)
    assert not call(problem).requires_grad
    problem.q.requires_grad_()
    with torch.no_grad():
        assert not call(problem).requires_grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_is_written_in_place(device, layout):
    problem = LAYOUTS[layout](dtype=torch.bfloat16, device=device, causal=True)
    out = guarded(torch.full_like(problem.q, NAN))
    apart = torch.full((*problem.q.shape, 2), NAN, dtype=out.dtype, device=device)[..., 0]
    for given in (out, apart):
        returned = call(problem, out=given)
        assert returned.data_ptr() == given.data_ptr() and returned.stride() == given.stride()
        assert_matches_oracle({"out": given}, problem)
    assert_guard_intact(out)


def test_inputs_stay_as_they_were(device):
    problem = dense(device=device, **OPTIONS["everything"](2, 2, device))
    inputs = problem.q, problem.k, problem.v, problem.alibi_slopes, problem.s_aux
    before = [x.clone() for x in inputs]
    run(problem)
    assert all(map(torch.equal, inputs, before))


def test_max_seqlen_may_be_larger_or_a_tensor(device):
    problem = varlen([9, 14], [17, 14], device=device, causal=True)
    bounds = problem.cu_seqlens_q, problem.storage.cu_seqlens
    expected = call(problem)
    tensors = torch.tensor(14, device=device), torch.tensor(17, device=device)
    for sizes in ((200, 300), tensors, (2**40, 10**30)):
        out = flash_attn.flash_attn_varlen_func(
            problem.q, problem.k, problem.v, *bounds, *sizes, causal=True
        )
        assert torch.equal(out, expected)


@pytest.mark.parametrize("page_size", [1, 7, 16, 256])
@pytest.mark.parametrize("options", ["plain", "causal", "everything"])
def test_varlen_pages(device, page_size, options):
    seqlens_q, seqlens_k = [5, 9, 1], [21, 9, 130]
    problem = varlen(seqlens_q, seqlens_k, 4, 2, device=device, **OPTIONS[options](3, 4, device))
    check(in_pages(problem, page_size), backward=False)


def test_lengths_beyond_the_tensor_are_clamped(device):
    """Meaningless lengths give defined results: no illegal access, no NaN from elsewhere."""
    if device == "cpu":
        pytest.skip("what lies on the CPU is checked instead")
    problem = varlen([9, 14], [17, 14], device=device, slack=0)
    beyond = replace(problem, cu_seqlens_q=problem.cu_seqlens_q * 1000)
    beyond.storage = Storage(cu_seqlens=problem.storage.cu_seqlens * 1000)
    assert call(beyond).shape == problem.q.shape


def test_large_logits(device):
    """Online softmax has to survive scores that overflow exp."""
    problem = dense(1, 130, 260, device=device, softmax_scale=1.0)
    problem.q *= 30
    check(problem)
