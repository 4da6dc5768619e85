"""What the sm80 kernels alone have: tiles of other GPUs, any alignment, an ordered backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import device_fixture
from helpers import (
    LAYOUTS,
    call,
    check,
    dense,
    dtype_name,
    misaligned,
    randn,
    random_pages,
    run,
    varlen,
)
from oracle import assert_close_to_oracle, expect
from test_kernels import HALF, of_each_kernel, shared_memory, small

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


def test_pages_are_not_covered(device):
    problem = varlen([5], [5], headdim=64, dtype=torch.float16, device=device)
    k = v = randn(3, 16, 2, 64, dtype=torch.float16, device=device)
    storage = replace(problem.storage, block_table=random_pages(1, 1, device))
    with pytest.raises(NotImplementedError, match=r"block_table.*use_backend\('(sm90|tiled)'\)"):
        call(replace(problem, k=k, v=v, storage=storage))
