"""What the sm80 kernels alone have: tiles of other GPUs, any alignment, an ordered backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import device_fixture
from helpers import (
    LAYOUTS,
    OPTIONS,
    call,
    check,
    dense,
    dtype_name,
    guarded,
    in_pages,
    misaligned,
    run,
    varlen,
)
from oracle import Attention, assert_close_to_oracle, expect
from test_kernels import HALF, large, of_each_kernel, shared_memory, small
from test_kvcache import check as check_kvcache
from test_kvcache import decode

from flash_attn._backends import cuda

pytestmark = pytest.mark.gpu

device = device_fixture("cuda-sm80")


@of_each_kernel
@pytest.mark.parametrize("dtype", HALF, ids=dtype_name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("features", ["plain", "everything", "unaligned"])
@pytest.mark.parametrize("kilobytes", [163, 99])
def test_tiles_of_other_gpus_for_the_sanitizer(
    device, kilobytes, features, layout, dtype, headdims
):
    """Those of an A100 and of a GPU of cc 8.6, 8.9 or 12.0."""
    with shared_memory(kilobytes):
        check(small(layout, features, headdims, dtype, device), deterministic=layout == "varlen")


@of_each_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_tiles_of_99_kilobytes(device, options, layout, headdims):
    options = OPTIONS[options](2 if layout == "dense" else 3, 4, device)
    problem = large(layout, 4, 2, *headdims, dtype=torch.bfloat16, device=device, **options)
    with shared_memory(99):
        check(problem, deterministic=layout == "varlen")


def check_each_tile(problem: Attention, headdims: tuple[int, int]) -> list[int]:
    """Check the forward with each tile shape that fits the shared memory; which those are."""
    kernel = "forward", "sm80", *headdims
    (count,) = {
        x.tiles for x in cuda._KERNELS if (x.operation, x.backend, x.headdim, x.headdim_v) == kernel
    }
    fitting = []
    for tile in range(count):
        with cuda.changed_setting("tile", tile):
            try:
                call(problem)
            except ValueError as error:
                assert str(error).startswith(f"tile: got {tile}, which takes "), error
                continue
            check(problem, backward=False)
        fitting.append(tile)
    return fitting


@of_each_kernel
@pytest.mark.parametrize("dtype", HALF, ids=dtype_name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("features", ["plain", "everything", "unaligned"])
def test_each_tile_for_the_sanitizer(device, features, layout, dtype, headdims):
    assert check_each_tile(small(layout, features, headdims, dtype, device), headdims)


@of_each_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_each_tile(device, options, layout, headdims):
    options = OPTIONS[options](2 if layout == "dense" else 3, 4, device)
    problem = large(layout, 4, 2, *headdims, dtype=torch.bfloat16, device=device, **options)
    assert check_each_tile(problem, headdims)


@pytest.mark.parametrize(
    "kilobytes, headdim, fitting",
    [
        (163, 128, [0, 1, 2, 3]),
        (99, 128, [0, 1, 2, 3]),
        (163, 192, [1, 2]),
        (99, 192, [1, 2]),
        (163, 256, [1, 2]),
        (99, 256, [2]),
    ],
)
def test_tiles_that_do_not_fit(device, kilobytes, headdim, fitting):
    """They are not chosen and cannot be forced."""
    properties = torch.cuda.get_device_properties(device)
    if properties.shared_memory_per_block_optin < kilobytes * 1024:
        pytest.skip(f"the GPU has less than {kilobytes} KB")
    problem = dense(2, 130, 200, 4, 2, headdim, dtype=torch.float16, device=device, causal=True)
    with shared_memory(kilobytes):
        assert check_each_tile(problem, (headdim, headdim)) == fitting
        check(problem, backward=False)
    with cuda.changed_setting("shared_memory", 1024):
        with pytest.raises(ValueError, match=f"^shared_memory: got 1024 .* {headdim} and"):
            call(problem)
        assert check_each_tile(problem, (headdim, headdim)) == []


def test_negative_number_of_parts(device):
    problem = dense(2, 70, 300, 4, 2, 64, dtype=torch.float16, device=device)
    message = "^num_splits: got -2; accepted by the sm80 forward: 0 or more"
    with cuda.changed_setting("num_splits", -2), pytest.raises(ValueError, match=message):
        call(problem)


@of_each_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [*OPTIONS, "unaligned"])
def test_divided_keys_of_each_tile(device, options, layout, headdims):
    with cuda.changed_setting("num_splits", 3):
        if options == "unaligned":
            problem = small(layout, options, headdims, torch.bfloat16, device)
        else:
            given = OPTIONS[options](2 if layout == "dense" else 3, 4, device)
            given |= {"dtype": torch.bfloat16, "device": device}
            problem = large(layout, 4, 2, *headdims, **given)
        assert check_each_tile(problem, headdims)


@pytest.mark.parametrize("headdims", [(100, 100), (70, 50), (256, 9)], ids=str)
def test_divided_keys_of_odd_head_dims(device, headdims):
    """Four columns of the output can't be written at once."""
    given = {"dtype": torch.float16, "device": device, "causal": True}
    with cuda.changed_setting("num_splits", 4):
        check(dense(2, 70, 300, 4, 2, *headdims, **given), backward=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_several_launches(device, layout):
    """What the parts of some blocks of queries leave is merged before others begin."""
    given = {"dtype": torch.bfloat16, "device": device, "causal": True}
    if layout == "dense":
        problem = dense(3, 1100, 1300, 8, 2, 128, **given)
    else:
        problem = varlen([1100, 0, 70, 300], [1300, 20, 90, 257], 8, 2, 128, **given)
    with cuda.changed_setting("num_splits", 32):
        check(problem, backward=False)


@pytest.mark.parametrize("headdim", [192, 256])
@pytest.mark.parametrize("kilobytes", [163, 99])
def test_given_parts_on_other_gpus(device, kilobytes, headdim):
    """The first tile shape that fits has the keys divided, whatever else is in the batch."""
    given = {"dtype": torch.bfloat16, "device": device, "causal": True}
    case = decode([300, 70], 40, 0, 301, nheads=8, headdim=headdim, **given)
    with shared_memory(kilobytes):
        for parts in (1, 3):
            check_kvcache(case, num_splits=parts)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_one_misaligned_operand(device, which):
    problem = dense(2, 70, 140, 4, 2, 64, dtype=torch.bfloat16, device=device, causal=True)
    check(replace(problem, **{which: misaligned(getattr(problem, which))}))


@of_each_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
def test_deterministic(device, layout, headdims):
    """Bit-identical from run to run; the faster order is as good."""
    options = {"dtype": torch.bfloat16, "device": device, "causal": True}
    if layout == "dense":
        problem = dense(1, 515, 515, 4, 2, *headdims, **options)
    else:
        problem = varlen([515, 70], [515, 200], 4, 2, *headdims, **options)
    first, upstream = run(problem, deterministic=True)
    for _ in range(49):
        again, _ = run(problem, deterministic=True)
        for name, value in first.items():
            assert torch.equal(value, again[name]), name
    any_order, _ = run(problem, deterministic=False)
    expected = expect(problem, **upstream)
    for name in expected:
        assert_close_to_oracle(first[name], expected[name], f"deterministic {name}")
        assert_close_to_oracle(any_order[name], expected[name], name)


@of_each_kernel
@pytest.mark.parametrize("page_size", [1, 5, 16, 96])
def test_pages_of_each_tile(device, page_size, headdims):
    options = {"dtype": torch.bfloat16, "device": device, "causal": True}
    problem = varlen([3, 150, 0, 64, 1], [5, 190, 70, 0, 257], 4, 2, *headdims, **options)
    assert check_each_tile(in_pages(problem, page_size), headdims)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("place", [guarded, misaligned])
def test_strided_pages(device, place, which):
    """Of K's and V's rows and pages each has strides of its own."""
    options = {"dtype": torch.bfloat16, "device": device}
    problem = in_pages(varlen([3, 150], [190, 257], 4, 2, 64, **options), 7)
    check(replace(problem, **{which: place(getattr(problem, which))}), backward=False)
