"""Forwards whose keys are divided among thread blocks, in the kernels."""

from __future__ import annotations

import pytest
import torch
from conftest import KERNELS, decode_fixture, device_fixture
from helpers import OPTIONS, check, check_bits, dense, varlen
from test_kernels import MASKS, of_each_kernel
from test_kvcache import check as check_kvcache
from test_kvcache import check_graph, decode

from flash_attn._backends import cuda

pytestmark = pytest.mark.gpu

device = device_fixture(*KERNELS)
decode_kernel = decode_fixture(False)  # that kernel has test_decode.py


def check_options(device: str, options: str, splits: int, headdims: tuple[int, int]) -> None:
    """Dense and packed sequences; more parts than blocks of keys, and sequences without keys."""
    given = {"dtype": torch.bfloat16, "device": device}
    problems = [
        dense(2, 70, 900, 4, 2, *headdims, **given, **OPTIONS[options](2, 4, device)),
        varlen(
            [130, 0, 9, 40],
            [700, 30, 0, 257],
            4,
            2,
            *headdims,
            **given,
            **OPTIONS[options](4, 4, device),
        ),
    ]
    with cuda.changed_setting("num_splits", splits):
        for problem in problems:
            check(problem, backward=False)


@of_each_kernel
@pytest.mark.parametrize("splits", [2, 5, 16])
@pytest.mark.parametrize("options", OPTIONS)
def test_divided_keys(device, options, splits, headdims):
    check_options(device, options, splits, headdims)


def check_caches(device: str, mask: str, page_size: int | None, splits: int) -> None:
    lengths = [0, 5, 77, 128, 129, 900]
    sizes = {"nheads": 8, "nheads_kv": 2, "headdim": 128, "page_size": page_size}
    case = decode(lengths, 3, 0, 901, dtype=torch.bfloat16, device=device, **sizes, **MASKS[mask])
    with cuda.changed_setting("num_splits", splits):
        check_kvcache(case)


@pytest.mark.parametrize("page_size", [None, 1, 16, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_divided_caches(device, mask, page_size):
    check_caches(device, mask, page_size, 4)


def check_order(device: str, mask: str, headdim: int, splits: int) -> None:
    """Parts merge in the order of the keys."""
    problem = dense(2, 300, 1500, 4, 2, headdim, dtype=torch.bfloat16, device=device, **MASKS[mask])
    with cuda.changed_setting("num_splits", splits):
        check_bits(problem, 50)


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_divided_keys_are_deterministic(device, mask, headdim):
    check_order(device, mask, headdim, 6)


def check_replays(device: str, splits: int) -> None:
    """With lengths that change in between."""
    given = {"nheads": 8, "nheads_kv": 2, "headdim": 128, "dtype": torch.bfloat16}
    case = decode([900, 513], 70, 0, 901, causal=True, device=device, **given)
    with cuda.changed_setting("num_splits", splits):
        check_graph(case, [900, 513], [70, 5], [71, 512])


def test_graph_of_divided_keys(device):
    check_replays(device, 5)
