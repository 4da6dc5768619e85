"""Cross-entropy against PyTorch's in float64. (Split vocabularies: test_distributed_utils.py.)"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn import _rowwise
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
IGNORED = -100


def problem(rows: int, classes: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    logits = (3 * torch.randn(rows, classes, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(classes, (rows,), device=device)
    labels[rows // 2 :: 5] = IGNORED
    return logits, labels


def reference(logits: Tensor, labels: Tensor, scale: float, smoothing: float, z: float) -> tuple:
    """Losses and z-losses of each row."""
    logits = logits * scale
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    z_losses = z * logits.logsumexp(1).square() * (labels != IGNORED)
    return losses + z_losses, z_losses


def assert_rounded(x: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Rounded once to this dtype, from sums in float32 (float64) of numbers up to about 10."""
    exact = 1e-12 if dtype == torch.float64 else 2e-6
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = exact * (1 + expected.abs()) + torch.finfo(dtype).eps * expected.abs() + smallest
    assert x.dtype == dtype and ((x.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("options", [(1.0, 0.0, 0.0), (0.7, 0.1, 0.0), (1.3, 0.2, 1e-2)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "chunk", "device"),
    [
        *product(DTYPES, (None, 1, 4), ("cpu",)),
        *(pytest.param(x, None, "cuda", marks=pytest.mark.gpu) for x in DTYPES[:2]),
    ],
    ids=str,
)
def test_losses_and_gradient(
    dtype: torch.dtype,
    chunk: int | None,
    device: str,
    options: tuple[float, ...],
    inplace: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if chunk is not None:
        monkeypatch.setattr(_rowwise, "_chunk_size", lambda x: chunk)
    scale, smoothing, z = options
    logits, labels = problem(13, 37, dtype, device)
    exact = logits.detach().double().requires_grad_()
    expected, expected_z = reference(exact, labels, *options)
    dlosses = torch.randn(13, dtype=torch.float64, device=device)
    expected.backward(dlosses)

    losses, z_losses = cross_entropy_loss(
        logits, labels, None, smoothing, scale, z, inplace_backward=inplace
    )
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    assert_rounded(losses, expected.detach(), sums)
    assert_rounded(z_losses, expected_z.detach(), sums)
    assert not z_losses.requires_grad
    losses.backward(dlosses.to(sums))
    assert logits.grad is not None and exact.grad is not None
    assert_rounded(logits.grad, exact.grad, dtype)
    assert (logits.grad[labels == IGNORED] == 0).all()
    assert (logits.grad.data_ptr() == logits.data_ptr()) == inplace


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_module(reduction: str) -> None:
    logits, labels = problem(11, 20, torch.float32)
    expected = F.cross_entropy(logits, labels, reduction=reduction)
    loss = CrossEntropyLoss(reduction=reduction)(logits, labels)
    torch.testing.assert_close(loss, expected)

    module = CrossEntropyLoss(reduction=reduction, lse_square_scale=0.1, return_z_loss=True)
    loss, z_loss = module(logits, labels.int())
    torch.testing.assert_close(loss - z_loss, expected)
    used = logits.logsumexp(1)[labels != IGNORED]
    if reduction != "none":
        mean = 0.1 * used.square().mean()
        torch.testing.assert_close(z_loss, mean if reduction == "mean" else mean * used.numel())


def test_ignored_rows_may_hold_nan() -> None:
    logits, labels = problem(10, 7, torch.float32)
    with torch.no_grad():
        logits[labels == IGNORED] = torch.nan
    loss = CrossEntropyLoss()(logits, labels)
    loss.backward()
    assert loss.isfinite() and logits.grad is not None and logits.grad.isfinite().all()


def test_another_ignore_index() -> None:
    logits, labels = problem(10, 7, torch.float32)
    labels[labels == IGNORED] = 3
    expected = F.cross_entropy(logits, labels, ignore_index=3)
    loss = CrossEntropyLoss(ignore_index=3)(logits, labels)
    torch.testing.assert_close(loss, expected)
    grads = (torch.autograd.grad(x, logits)[0] for x in (loss, expected))
    torch.testing.assert_close(*grads)


def test_precomputed_lse_is_used() -> None:
    logits, labels = problem(9, 7, torch.float32)
    lse = logits.detach().logsumexp(1)
    losses, _ = cross_entropy_loss(logits, labels, lse)
    shifted, _ = cross_entropy_loss(logits, labels, lse + 1)
    torch.testing.assert_close(shifted, torch.where(labels == IGNORED, 0, losses + 1))
    losses.sum().backward()
    expected = logits.detach().requires_grad_()
    F.cross_entropy(expected, labels, reduction="sum").backward()
    torch.testing.assert_close(logits.grad, expected.grad)
    assert cross_entropy_loss(logits, labels, lse.double())[0].dtype == torch.float32
    # As upstream, it is computed again where it cannot be the one of the scaled logits.
    scaled, _ = cross_entropy_loss(logits, labels, lse + 1, logit_scale=0.5)
    torch.testing.assert_close(scaled, F.cross_entropy(0.5 * logits, labels, reduction="none"))
    smooth, _ = cross_entropy_loss(logits, labels, lse + 1, 0.1)
    expected = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(smooth, expected)


def test_strided_logits() -> None:
    logits, labels = problem(9, 14, torch.float32)
    view = logits.detach().t().contiguous().t()[:, ::2].requires_grad_()
    labels = labels.clamp(max=6)
    loss = CrossEntropyLoss(inplace_backward=True)(view, labels)
    expected = view.detach().clone().requires_grad_()
    F.cross_entropy(expected, labels).backward()
    loss.backward()
    torch.testing.assert_close(view.grad, expected.grad)
    torch.testing.assert_close(view.detach(), expected.grad)


def test_no_rows() -> None:
    logits, labels = torch.zeros(0, 5, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    losses, _ = cross_entropy_loss(logits, labels)
    losses.sum().backward()
    assert losses.shape == (0,) and logits.grad is not None and logits.grad.shape == (0, 5)


def test_nothing_but_the_logits_is_kept() -> None:
    logits, labels = problem(64, 1000, torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        cross_entropy_loss(logits, labels)
    assert sorted(x.numel() for x in kept) == [64, 64, 64 * 1000]
    assert any(x.data_ptr() == logits.data_ptr() for x in kept)


def test_overwritten_logits_are_not_used_again() -> None:
    """Neither for a second backward nor by another function that saved them."""
    logits, labels = problem(5, 6, torch.float32)
    losses, _ = cross_entropy_loss(logits, labels, inplace_backward=True)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()

    logits, labels = problem(5, 6, torch.float32)
    outputs = logits.tanh()  # tanh keeps its result
    loss = CrossEntropyLoss(inplace_backward=True)(outputs, labels)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_compile(device: str) -> None:
    torch._dynamo.reset()
    logits, labels = problem(6, 9, torch.float32, device)
    module = CrossEntropyLoss(label_smoothing=0.1)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(logits, labels).backward()
    (expected,) = torch.autograd.grad(module(logits, labels), logits)
    torch.testing.assert_close(logits.grad, expected)


def wrong(**changed: Any) -> dict[str, Any]:
    return {"logits": torch.zeros(4, 6), "labels": torch.zeros(4, dtype=torch.int64), **changed}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (wrong(logits=torch.zeros(2, 2, 6)), ValueError, r"logits must .*got .*\(2, 2, 6\)"),
        (wrong(logits=torch.zeros(4, 6).long()), ValueError, "logits must .*got torch.int64"),
        (wrong(labels=torch.zeros(4)), TypeError, "labels must be int32 or int64"),
        (wrong(labels=[0, 1, 2, 3]), TypeError, "labels must be a torch.Tensor, got list"),
        (wrong(logits=[[0.0]]), TypeError, "logits must be a torch.Tensor, got list"),
        (wrong(labels=torch.zeros(5).long()), ValueError, r"labels must .*\(4,\).*got \(5,\)"),
        (wrong(labels=torch.tensor([0, 6, 1, 2])), ValueError, r"labels must .*\[0, 6\).*got 6"),
        (wrong(labels=torch.tensor([0, -1, 1, 2])), ValueError, "labels must .*got -1"),
        (wrong(precomputed_lse=torch.zeros(3)), ValueError, "precomputed_lse must"),
        (wrong(label_smoothing="a"), TypeError, "label_smoothing must be a number"),
        (wrong(labels=None), TypeError, "labels must be a torch.Tensor, got NoneType"),
        (wrong(logit_scale=float("nan")), ValueError, "logit_scale must be finite, got nan"),
        (wrong(lse_square_scale=1e999), ValueError, "lse_square_scale must be finite, got inf"),
        (wrong(label_smoothing=-0.1), ValueError, r"label_smoothing must be in \[0, 1\]"),
        (wrong(ignore_index=0.5), TypeError, "ignore_index must be an int"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        cross_entropy_loss(**arguments)


def test_wrong_reduction() -> None:
    with pytest.raises(ValueError, match="reduction must be .*got 'total'"):
        CrossEntropyLoss(reduction="total")


def test_second_derivatives_are_refused() -> None:
    logits = torch.randn(4, 6, requires_grad=True)
    losses, _ = cross_entropy_loss(logits, torch.arange(4))
    (gradient,) = torch.autograd.grad((losses * torch.randn(4)).sum(), logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        gradient.square().sum().backward()


def test_labels_without_data() -> None:
    with FakeTensorMode():
        losses, _ = cross_entropy_loss(**wrong())
        assert losses.shape == (4,)
