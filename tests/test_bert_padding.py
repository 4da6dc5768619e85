"""Packing and padding, against loops over tokens."""

import pytest
import torch
from torch import Tensor

from flash_attn.bert_padding import (
    IndexFirstAxis,
    IndexFirstAxisResidual,
    IndexPutFirstAxis,
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    rearrange,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

# A full row, holes in the middle, an empty row and a single token.
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]])
BATCH, SEQLEN = MASK.shape


def positions(mask: Tensor) -> list[tuple[int, int]]:
    """(sequence, token) of each non-zero entry, in row-major order."""
    return [(b, s) for b in range(mask.shape[0]) for s in range(mask.shape[1]) if mask[b, s]]


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("trailing", [(), (6,), (2, 3)], ids=str)
def test_unpad_and_pad(mask_dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    x = torch.randn(BATCH, SEQLEN, *trailing)
    mask = MASK.to(mask_dtype) * (1 if mask_dtype == torch.bool else 2)  # whatever is not zero
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)

    assert torch.equal(tokens, torch.stack([x[b, s] for b, s in positions(MASK)]))
    assert indices.tolist() == [b * SEQLEN + s for b, s in positions(MASK)]
    assert cu_seqlens.tolist() == [0, 5, 8, 8, 9] and cu_seqlens.dtype == torch.int32
    assert max_seqlen == 5 and type(max_seqlen) is int
    assert seqused.tolist() == [5, 3, 0, 1] and seqused.dtype == torch.int32

    padded = pad_input(tokens, indices, BATCH, SEQLEN)
    expected = x * MASK.reshape(BATCH, SEQLEN, *[1] * len(trailing))
    assert torch.equal(padded, expected)


def test_unused_tokens_are_packed_but_not_counted() -> None:
    x = torch.randn(BATCH, SEQLEN, 4)
    unused = torch.zeros_like(MASK)
    unused[1, 0] = unused[2, 4] = 1
    unused[0, 0] = 1  # already real: it must not be counted twice
    tokens, _, cu_seqlens, max_seqlen, seqused = unpad_input(x, MASK, unused)
    assert torch.equal(tokens, torch.stack([x[b, s] for b, s in positions(MASK | unused)]))
    assert cu_seqlens.tolist() == [0, 5, 9, 10, 11]
    assert max_seqlen == 5
    assert seqused.tolist() == [5, 3, 0, 1]


def test_token_ids_stay_integers() -> None:
    ids = torch.randint(1, 1000, (BATCH, SEQLEN))
    tokens, indices, *_ = unpad_input(ids, MASK)
    assert tokens.dtype == torch.int64 and tokens.shape == (9,)
    assert torch.equal(pad_input(tokens, indices, BATCH, SEQLEN), ids * MASK)
    assert torch.equal(index_first_axis(ids.flatten(), indices), tokens)
    assert torch.equal(index_first_axis(ids.flatten(), indices.int()), tokens)


def test_padding_may_hold_nan() -> None:
    x = torch.randn(BATCH, SEQLEN, 4, requires_grad=True)
    poisoned = torch.where(MASK.bool().unsqueeze(-1), x, float("nan"))
    tokens, indices, *_ = unpad_input(poisoned, MASK)
    padded = pad_input(tokens, indices, BATCH, SEQLEN)
    assert not padded.isnan().any()
    padded.sum().backward()
    assert torch.equal(x.grad, MASK.unsqueeze(-1).expand_as(x).float())


@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_to_pack(batch: int) -> None:
    x, mask = torch.randn(batch, 3, 4), torch.zeros(batch, 3, dtype=torch.bool)
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)
    assert tokens.shape == (0, 4) and indices.shape == (0,) and max_seqlen == 0
    assert cu_seqlens.tolist() == [0] * (batch + 1) and seqused.tolist() == [0] * batch
    assert torch.equal(pad_input(tokens, indices, batch, 3), torch.zeros(batch, 3, 4))


def test_concatenated_sequences() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 1, 0, 0, 0], [0] * 6, [6, 0, 0, 0, 0, 0]])
    x = torch.randn(4, 6, 2, 3)
    tokens, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1], x[3]]))
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 11, 17] and cu_seqlens.dtype == torch.int32
    assert max_seqlen == 6 and type(max_seqlen) is int
    used = torch.arange(6) < lengths.sum(1, keepdim=True)
    assert torch.equal(pad_input(tokens, indices, 4, 6), x * used[..., None, None])


def test_gradients() -> None:
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 2])
    assert torch.autograd.gradcheck(index_first_axis, (x, indices))
    assert torch.autograd.gradgradcheck(index_first_axis, (x, indices))
    assert torch.autograd.gradcheck(index_put_first_axis, (x[:3], indices, 7))
    assert torch.autograd.gradgradcheck(index_put_first_axis, (x[:3], indices, 7))
    assert torch.autograd.gradcheck(index_first_axis_residual, (x, indices))


def test_names_of_upstreams_autograd_functions() -> None:
    x, indices = torch.randn(5, 2, 3), torch.tensor([4, 0, 2])
    selected = IndexFirstAxis.apply(x, indices)
    assert torch.equal(selected, x[indices])
    put = IndexPutFirstAxis.apply(selected, indices, 7)
    assert put.shape == (7, 2, 3) and torch.equal(put[indices], selected)
    again, residual = IndexFirstAxisResidual.apply(x, indices)
    assert torch.equal(again, selected) and residual is x


def test_residual_adds_both_gradients() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    selected, residual = index_first_axis_residual(x, torch.tensor([1, 3]))
    (selected.sum() + 10 * residual.sum()).backward()
    assert x.grad[:, 0].tolist() == [10, 11, 10, 11, 10]


def test_compiles_without_graph_break() -> None:
    def round_trip(x: Tensor, indices: Tensor) -> Tensor:
        return pad_input(index_first_axis(x, indices), indices, BATCH, SEQLEN)

    x, indices = torch.randn(BATCH * SEQLEN, 4), MASK.flatten().nonzero().flatten()
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, indices), round_trip(x, indices))


def test_rearrange_is_importable() -> None:
    assert rearrange(torch.zeros(2, 3, 4), "b s d -> (b s) d").shape == (6, 4)


X = torch.zeros(2, 3, 4)
INDICES = torch.tensor([0])


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: unpad_input(X, torch.ones(2, 4)),
            ValueError,
            r"attention_mask must .* \(2, 3\), got \(2, 4\)",
        ),
        (
            lambda: unpad_input(X, torch.ones(2, 3), torch.ones(3)),
            ValueError,
            r"unused_mask must .* \(2, 3\), got \(3,\)",
        ),
        (
            lambda: unpad_input(X[0, 0], torch.ones(4)),
            ValueError,
            r"hidden_states must have shape \(batch, seqlen, ...\), got \(4,\)",
        ),
        (
            lambda: unpad_input_for_concatenated_sequences(X, torch.tensor([[2, 2, 0]] * 2)),
            ValueError,
            r"attention_mask_in_length must .* seqlen = 3 .*, got \[\[2, 2, 0\]",
        ),
        (
            lambda: unpad_input_for_concatenated_sequences(X, torch.tensor([[2, -1, 0]] * 2)),
            ValueError,
            r"attention_mask_in_length must have lengths >= 0",
        ),
        (
            lambda: index_first_axis(X, torch.ones(2, dtype=torch.bool)),
            TypeError,
            r"indices must have dtype torch.int64 or torch.int32, got torch.bool",
        ),
        (
            lambda: index_first_axis(X, torch.ones(1, 1, dtype=torch.int64)),
            ValueError,
            r"indices must have shape \(nnz,\), got \(1, 1\)",
        ),
        (
            lambda: pad_input(X, torch.arange(3), 2, 3),
            ValueError,
            r"values must have one row for each of the 3 indices, got shape \(2, 3, 4\)",
        ),
        (lambda: index_first_axis([X], INDICES), TypeError, "^x must be a torch.Tensor, got list"),
        (lambda: index_first_axis(X, [0]), TypeError, "^indices must be .*, got list"),
        (lambda: index_put_first_axis([1], INDICES, 2), TypeError, "^values must .*, got list"),
        (lambda: pad_input([1], INDICES, 1, 1), TypeError, "^hidden_states must .*, got list"),
        (lambda: pad_input(X, INDICES, 1.5, 1), TypeError, "^batch must be an int, got float 1.5"),
        (lambda: pad_input(X, INDICES, -1, 1), ValueError, "^batch must be at least 0, got -1"),
        (lambda: pad_input(X, None, 1, 1), TypeError, "^indices must .*, got NoneType"),
        (
            lambda: index_put_first_axis(X, torch.arange(2), 2.5),
            TypeError,
            "^first_axis_dim must be an int, got float 2.5",
        ),
        (lambda: unpad_input(X, None), TypeError, "^attention_mask must .*, got NoneType"),
        (lambda: unpad_input([1], INDICES), TypeError, "^hidden_states must .*, got list"),
        (lambda: unpad_input(X, [[1]]), TypeError, "^attention_mask must be .*, got list"),
    ],
)
def test_bad_input(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()
