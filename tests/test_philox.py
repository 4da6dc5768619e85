"""The random numbers of dropout: known answers, and a second derivation of the element map."""

from __future__ import annotations

import pytest
import torch

from flash_attn._backends.philox import (
    draw_rng_state,
    dropout_keep_mask,
    philox_2x32,
    philox_4x32,
)

# Known answers of Random123: counter, key, output. Generators by the number of their words.
KNOWN_ANSWERS = {
    "4x32-zeros": ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "4x32-ones": (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "4x32-pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
    "2x32-zeros": ((0,) * 2, (0,), (0x257A3673, 0xCD26BE2A)),
    "2x32-ones": ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,), (0xAB302C4D, 0x3DC9D239)),
    "2x32-pi": ((0x243F6A88, 0x85A308D3), (0x13198A2E,), (0xBEDBBE6B, 0xE4C770B3)),
}


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 or Philox2x32-7 on Python's integers, after Salmon et al. (SC 2011)."""
    mask = 0xFFFFFFFF
    for bump in range(10 if len(counter) == 4 else 7):
        key0 = (key[0] + bump * 0x9E3779B9) & mask
        if len(counter) == 2:
            product = counter[0] * 0xD256D193
            counter = ((product >> 32) ^ counter[1] ^ key0, product & mask)
            continue
        key1 = (key[1] + bump * 0xBB67AE85) & mask
        product0, product1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = (
            (product1 >> 32) ^ counter[1] ^ key0,
            product1 & mask,
            (product0 >> 32) ^ counter[3] ^ key1,
            product0 & mask,
        )
    return counter


def number_of_element(rng_state: tuple[int, int], batch_head: int, row: int, column: int) -> int:
    """The random number of 39 bits of one probability."""
    seed, offset = rng_state
    seed_words = (seed % 2**32, seed // 2**32 % 2**32)
    head_key = philox((batch_head, 0, 0, offset % 2**32), seed_words)[0]
    row_group, column_group = row // 16 * 8 + row % 8, column // 16 * 4 + column % 8 // 2
    words = philox((column_group, row_group), (head_key,))
    place = column // 8 % 2 * 2 + column % 2
    own = 127 - words[row // 8 % 2] // 256**place % 128
    x, y = words
    return own * 2**32 + (y * 0x9E3779B9 + x) % 2**32


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_known_answers(name):
    counter, key, output = KNOWN_ANSWERS[name]
    assert philox(counter, key) == output
    counter, key = ([torch.tensor(word) for word in words] for words in (counter, key))
    words = philox_4x32(counter, key) if len(key) == 2 else philox_2x32(counter, *key)
    assert tuple(int(word) for word in words) == output


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mask_of_each_element(device, p):
    rng_state = (0x7EDC_BA98_7654_3210, 0x0123_4567_FEDC_BA98)
    batch, nheads, seqlen_q, seqlen_k = 2, 2, 19, 35
    keep = dropout_keep_mask(
        torch.tensor(rng_state, device=device), p, batch, nheads, seqlen_q, seqlen_k
    ).cpu()
    assert keep.shape == (batch, nheads, seqlen_q, seqlen_k) and keep.dtype == torch.bool
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, keep.shape)).tolist():
        kept = number_of_element(rng_state, b * nheads + h, i, j) >= round(p * 2**39)
        assert keep[b, h, i, j] == kept, (b, h, i, j)


def test_a_number_equal_to_the_threshold_is_kept(device):
    number = number_of_element((1, 2), 0, 0, 0)
    kept = [
        dropout_keep_mask(torch.tensor([1, 2], device=device), n / 2**39, 1, 1, 1, 1).item()
        for n in (number, number + 1)
    ]
    assert kept == [True, False]


def test_states_have_all_their_bits(device):
    """A seed has 63 random bits, and so has an offset."""
    seen = torch.stack([draw_rng_state(torch.device(device)) for _ in range(64)]).cpu()
    assert (seen >= 0).all() and len(seen.unique()) == seen.numel()
    for bit in range(63):
        bits = ((seen >> bit) & 1).bool()
        assert (bits.any(0) & ~bits.all(0)).all(), bit


@pytest.mark.parametrize("p", [0.0, 1e-30, 0.01, 0.1, 0.5, 0.9, 1 - 1e-7])
def test_keep_rate(device, p):
    rng_state = torch.tensor([1, 2], device=device)
    keep = dropout_keep_mask(rng_state, p, 2, 4, 256, 256).double()
    n = keep.numel()
    # Five standard deviations, and no more than that between the rates of heads, rows or columns.
    assert abs(keep.mean().item() - (1 - p)) <= 5 * (p * (1 - p) / n) ** 0.5
    for dim in range(4):
        rates = keep.movedim(dim, 0).flatten(1).mean(1)
        spread = 5 * (p * (1 - p) * len(rates) / n) ** 0.5
        assert (rates - (1 - p)).abs().max() <= spread


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_elements_are_independent(device, p):
    """No element of the mask tells about another: of its draw, of its neighbourhood, of the same
    place in another head or sequence."""
    rng_state = torch.tensor([5, 6], device=device)
    keep = dropout_keep_mask(rng_state, p, 2, 4, 256, 256).double()
    keep = (keep - keep.mean()) / keep.std()
    of_draw = [(8, 0), (0, 8), (8, 8), (0, 1), (0, 9), (8, 1), (8, 9)]
    for dims, shifts in [
        *(((2, 3), shift) for shift in [*of_draw, (1, 0), (1, 1), (16, 16)]),
        *(((0, 1), shift) for shift in [(1, 0), (0, 1), (1, 1), (0, 2)]),
    ]:
        correlation = (keep * keep.roll(shifts, dims)).mean().item()
        # Shifts of half a dimension count each pair twice.
        assert abs(correlation) <= 5 * (2 / keep.numel()) ** 0.5, (dims, shifts)


def test_mask_depends_on_seed_and_offset(device):
    masks = [
        dropout_keep_mask(torch.tensor(state, device=device), 0.5, 1, 1, 64, 64)
        for state in ([1, 2], [2, 2], [1, 3], [1 + 2**32, 2])
    ]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            agreement = (mask == other).double().mean().item()
            assert abs(agreement - 0.5) < 0.05, "masks of different states are correlated"


def test_mask_does_not_depend_on_the_shape(device):
    rng_state = torch.tensor([3, 4], device=device)
    large = dropout_keep_mask(rng_state, 0.3, 2, 3, 65, 129)
    assert torch.equal(dropout_keep_mask(rng_state, 0.3, 1, 3, 33, 40), large[:1, :, :33, :40])
