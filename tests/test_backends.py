"""Which kernel runs a problem and which problems are left to tiled; no GPU is needed to ask."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from flash_attn import _arguments, _backends
from flash_attn._backends import cuda

HEADDIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
FULL = {"softcap", "alibi", "dropout", "place"}
TAKEN = {
    ("forward", "sm80"): ({"cache_slots"}, FULL | {"any_alignment", "pages"}),
    ("backward", "sm80"): (set(), FULL | {"any_alignment"}),
    ("forward", "sm90"): ({"cache_slots", "pages"}, FULL),
    ("backward", "sm90"): (set(), FULL),
    ("decode", "sm80"): ({"cache_slots", "pages"}, FULL - {"dropout", "place"}),
    ("decode", "sm90"): ({"cache_slots", "pages"}, FULL - {"dropout", "place"}),
}
ROWS = [
    cuda.Kernel(
        *kernel,
        dtype,
        dtype,
        dtype,
        *headdims,
        features,
        frozenset(always | (full if features == "full" else set())),
        1,
    )
    for (kernel, (always, full)), dtype, headdims, features in product(
        TAKEN.items(), ["fp16", "bf16"], HEADDIMS, ["plain", "full"]
    )
    if kernel[1] != "sm90" or kernel[0] == "decode" or headdims in HEADDIMS[1:]
]
SM80 = [row for row in ROWS if row.backend == "sm80"]
Build = Callable[..., None]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Pretend that the extension has these rows and that every device is such a GPU."""
    gpu = torch.device("cuda", 0)
    backends = _backends._built_backends

    def pretend(rows: Iterable[cuda.Kernel], capability: tuple[int, int] = (8, 0)) -> None:
        monkeypatch.setattr(cuda, "_KERNELS", tuple(rows))
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(
            _backends, "_built_backends", lambda device, *more: backends(gpu, *more)
        )
        cuda._smallest_kernel.cache_clear(), backends.cache_clear()

    yield pretend
    cuda._smallest_kernel.cache_clear(), backends.cache_clear()


def problem(
    headdim: int = 64,
    headdim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float = 0.0,
) -> _arguments.Attention:
    q, v = (torch.zeros(1, 8, 2, d, dtype=dtype) for d in (headdim, headdim_v or headdim))
    return _arguments.dense(q, q, v, _arguments.options(0.0, None, True, -1, -1, softcap, False))


@pytest.mark.parametrize(
    "given, kernel",
    [
        ((1, 1), (32, 32)),
        ((33, 8), (64, 64)),
        ((40, 72), (96, 96)),
        ((128, 128), (128, 128)),
        ((129, 100), (192, 128)),
        ((192, 129), (192, 192)),
        ((64, 192), (192, 192)),
        ((193, 1), (256, 256)),
    ],
    ids=str,
)
def test_smallest_kernel(build, given, kernel):
    build(SM80)
    aligned = all(headdim % 8 == 0 for headdim in given)
    found = SM80[cuda._kernel(problem(*given), "sm80", "backward", aligned)]
    assert (found.operation, found.dtype) == ("backward", "bf16")
    assert (found.headdim, found.headdim_v) == kernel
    assert found.feature_set == ("plain" if aligned else "full")
    assert _backends.choose(problem(*given)) == "sm80"


def cache_in_fp8(headdim: int, seqlen_q: int, dtype: torch.dtype) -> _arguments.Attention:
    q = torch.zeros(2, seqlen_q, 4, headdim, dtype=dtype)
    cache = torch.zeros(2, 300, 2, headdim).to(torch.float8_e4m3fn)
    options = _arguments.options(0.0, None, True, -1, -1, 0.0, False)
    names = ("rotary_cos", "rotary_sin", "rotary_interleaved", "cache_seqlens", "cache_batch_idx")
    nothing = dict.fromkeys((*names, "cache_leftpad", "block_table"))
    nothing["descales"] = (None, None, None)
    return _arguments.with_kvcache(q, cache, cache, None, None, options, None, None, **nothing)[0]


@pytest.mark.parametrize("seqlen_q", [1, 200])
def test_caches_in_fp8(build, seqlen_q):
    """They have decode kernels of their own, for any number of queries, and no others."""
    bf16, fp32 = torch.bfloat16, torch.float32
    build(ROWS, (9, 0))
    assert _backends.choose(cache_in_fp8(64, seqlen_q, bf16)) == "tiled"
    rows = [row._replace(kv_dtype="e4m3") for row in ROWS if row.operation == "decode"]
    build([*ROWS, *rows], (9, 0))
    given = cache_in_fp8(80, seqlen_q, bf16)
    assert _backends.choose(given) == "sm90" and cuda._decodes(given, "sm90", True)
    found = cuda._KERNELS[cuda._kernel(given, "sm90", "decode", True)]
    assert (found.dtype, found.kv_dtype, found.headdim) == ("bf16", "e4m3", 96)
    assert _backends.choose(cache_in_fp8(24, seqlen_q, bf16)) == "tiled"
    assert _backends.choose(cache_in_fp8(64, seqlen_q, fp32)) == "tiled"
    with _backends.use_backend("sm90"):
        with pytest.raises(NotImplementedError, match="moved 16 bytes at a time"):
            _backends.choose(cache_in_fp8(24, seqlen_q, bf16))
        with pytest.raises(NotImplementedError, match="float32 beside a cache of .*float8_e4m3fn"):
            _backends.choose(cache_in_fp8(64, seqlen_q, fp32))
    found = cuda._KERNELS[cuda._kernel(problem(), "sm90", "decode", True)]
    assert found.kv_dtype == "bf16"


def test_each_direction_where_it_has_a_kernel(build):
    build(row for row in SM80 if row.operation == "forward" or row.headdim <= 64)
    for headdim, expected in ((64, "sm80"), (65, "tiled")):
        assert _backends.choose(problem(headdim), "forward") == "sm80"
        assert _backends.choose(problem(headdim), "backward") == expected
    with _backends.use_backend("sm80"):
        with pytest.raises(NotImplementedError, match="no backward kernel.* 65 .*'tiled'"):
            _backends.choose(problem(65), "backward")
        with pytest.raises(NotImplementedError, match="up to 256, got 300 and 64"):
            _backends.choose(problem(300, 64))


@pytest.mark.parametrize(
    "missing, call, reason",
    [
        ("full", {"softcap": 1.0}, "has no forward with softcap"),
        ("full", {"headdim": 60}, "has no forward with tensors that cannot be moved 16 bytes"),
        ("fp16", {"dtype": torch.float16}, "no forward kernel for torch.float16"),
    ],
    ids=str,
)
def test_reduced_builds(build, missing, call, reason):
    build(row for row in SM80 if missing not in row)
    assert reason in cuda.unsupported(problem(**call), "sm80", "forward")
    assert _backends.choose(problem(**call)) == "tiled"
    assert _backends.choose(problem()) == "sm80"


def test_builds_without_some_rows(build):
    """What one row lacks another may take; if none does, it is said what is missing."""
    build(row for row in SM80 if "plain" not in row)
    assert _backends.choose(problem()) == "sm80"
    build(row for row in SM80 if row.feature_set == "plain" or row.headdim == 128)
    assert _backends.choose(problem(softcap=1.0)) == "sm80"
    reason = cuda.unsupported(problem(256, softcap=1.0), "sm80", "forward")
    assert reason == "was built without the forward kernel that this call needs, with softcap"


@pytest.mark.parametrize("dropout_p, asked", [(1e-30, set()), (2**-41, set()), (0.1, {"dropout"})])
def test_dropout_that_drops_nothing(dropout_p, asked):
    """What 39 random bits cannot tell from 0 needs no kernel with dropout."""
    options = _arguments.options(dropout_p, None, True, -1, -1, 0.0, False)
    assert problem()._replace(options=options).features == asked


@pytest.mark.parametrize(
    "row, dropout_p, backend",
    [(8, 0.0, "sm80"), (16, 0.1, "sm80"), (8, 0.1, "tiled"), (16, 0.1, "tiled: unequal")],
)
def test_parts_of_a_larger_problem(build, row, dropout_p, backend):
    """Kernels draw for 16 x 16 scores, and know one distance from the diagonal."""
    build(SM80)
    options = _arguments.options(dropout_p, None, True, -1, -1, 0.0, False)
    part = problem()._replace(options=options, place=_arguments.Place(nheads=2, row=row))
    if backend.endswith("unequal"):
        bounds = torch.tensor([0, 8], dtype=torch.int32)
        part = part._replace(cu_seqlens_q=bounds, cu_seqlens_k=bounds.clone())
    assert _backends.choose(part) == backend.partition(":")[0]
    if backend != "sm80":
        with _backends.use_backend("sm80"), pytest.raises(NotImplementedError, match="part of a"):
            _backends.choose(part)


def test_blocks_that_overlap():
    """Of two threads: the last one that began counts, and none when all have ended."""
    first, second = (_backends.use_backend(name) for name in ("tiled", "sm80"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(second)
        with contextlib.ExitStack() as other:
            other.enter_context(first)
            stack.close()
            assert cuda.forced_backend() == "tiled"
        assert cuda.forced_backend() is None
    assert cuda._settings == cuda._DEFAULTS


def test_devices_that_are_not_there(monkeypatch):
    """A torch without CUDA, or no driver: nobody is asked for a current device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:0", "cpu"):
        _backends._built_backends.cache_clear()
        assert _backends.available_backends(device) == ["tiled"]
    _backends._built_backends.cache_clear()


def test_missing_kernels_are_told_once(build):
    build([])
    given = problem()
    on_gpu = given._replace(q=SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16))
    _backends._warn_of_missing_kernels.cache_clear()
    with pytest.warns(UserWarning, match="without CUDA kernels.*FLASH_ATTN_REQUIRE_CUDA"):
        assert _backends.choose(on_gpu) == "tiled"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _backends.choose(on_gpu)
        _backends._warn_of_missing_kernels.cache_clear()
        _backends.choose(given)
        with _backends.use_backend("tiled"):
            _backends.choose(on_gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_left_to_tiled(build, dtype):
    build(SM80)
    assert _backends.choose(problem(dtype=dtype)) == "tiled"
    assert "bf16 128/128" in cuda.unsupported(problem(dtype=dtype), "sm80", "forward")


def test_pages_and_cache_slots(build):
    """A full kernel takes pages, any takes a cache's slots; the gradient of slots is tiled's."""
    build(SM80)
    index = torch.zeros(1, dtype=torch.int32)
    pages = problem()._replace(block_table=index[None])
    assert _backends.choose(pages) == "sm80"
    assert SM80[cuda._kernel(pages, "sm80", "forward", True)].feature_set == "full"
    slots = problem()._replace(cache_batch_idx=index)
    assert [_backends.choose(slots, d) for d in ("forward", "backward")] == ["sm80", "tiled"]


def test_few_rows_decode(build):
    """Rows are pairs of a query and a head of the group; what is forced is not asked."""
    build(ROWS, (9, 0))

    def decodes(nheads: int, seqlen_q: int = 1, aligned: bool = True, **changes: float) -> bool:
        q, k = (torch.zeros(1, n, h, 64).half() for n, h in ((seqlen_q, nheads), (70, 2)))
        options = _arguments.options(
            changes.get("dropout_p", 0.0), None, True, -1, -1, changes.get("softcap", 0.0), False
        )
        given = _arguments.dense(q, k, k, options)
        return cuda._decodes(given, "sm90", aligned)

    assert decodes(2, 32) and decodes(16, 4) and decodes(64) and decodes(8, softcap=1.0)
    assert not any((decodes(2, 33), decodes(18, 4), decodes(66), decodes(8, dropout_p=0.5)))
    assert not decodes(8, aligned=False)
    with cuda.changed_setting("tile", 0):
        assert not decodes(8)
        with cuda.changed_setting("decode", True):
            assert decodes(8)
    with cuda.changed_setting("decode", False):
        assert not decodes(8)
    build(row for row in ROWS if row.operation != "decode")
    assert not decodes(8)


def test_built_backends_of_a_device(build):
    """The Hopper kernels run on 9.0 alone, and come first there."""
    for capability, expected in (
        ((7, 5), []),
        ((8, 0), ["sm80"]),
        ((8, 9), ["sm80"]),
        ((9, 0), ["sm90", "sm80"]),
        ((10, 0), ["sm80"]),
    ):
        build(ROWS, capability)
        assert _backends.available_backends("cuda:0") == [*expected, "tiled"]
        assert _backends.choose(problem()) == [*expected, "tiled"][0]
        assert _backends.choose(problem(), "backward") == [*expected, "tiled"][0]


def shifted(like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape whose first element is not at a multiple of 16 bytes."""
    return like.new_zeros(like.numel() + 1)[1:].view(like.shape)


def test_what_sm90_does_not_cover_goes_to_the_next(build):
    build(ROWS, (9, 0))
    index = torch.zeros(1, 1, dtype=torch.int32)
    table = {"block_table": index}
    for given, changes, expected in (
        (problem(), {}, "sm90"),
        (problem(8, 256), {}, "sm90"),
        (problem(256), {"cache_batch_idx": index[0]}, "sm90"),
        (problem(), table, "sm90"),
        (problem(60), {}, "sm80"),
        (problem(64, 60), {}, "sm80"),
        (problem(), {"k": shifted(problem().k)}, "sm80"),
        (problem(), {"v": problem(68).v[..., :64]}, "sm80"),
        (problem(60), table, "sm80"),
        (problem(264), {}, "tiled"),
        (problem(dtype=torch.float32), {}, "tiled"),
    ):
        given = given._replace(**changes)
        assert _backends.choose(given) == expected
        if expected == "sm90":
            with _backends.use_backend("sm90"):
                assert _backends.choose(given) == "sm90"
        elif given.headdim <= 256:
            words = rf"^the sm90 backend has no .*; use_backend\('{expected}'\) does this$"
            with _backends.use_backend("sm90"), pytest.raises(NotImplementedError, match=words):
                _backends.choose(given)


def test_a_backward_that_forced_sm90_lacks_is_that_of_sm80(build):
    wide = [row for row in ROWS if row.backend == "sm90" and row.headdim > 128]
    build([row for row in ROWS if row.operation == "forward" or row not in wide], (9, 0))
    with _backends.use_backend("sm90"):
        assert _backends.choose(problem(), "backward") == "sm90"
        assert _backends.choose(problem(60), "backward") == "sm80"
        assert _backends.choose(problem(256), "backward") == "sm80"
        with pytest.raises(NotImplementedError, match="^the sm90 backend has no backward kernel"):
            _backends.choose(problem(dtype=torch.float32), "backward")
    build(ROWS, (8, 0))
    with _backends.use_backend("sm90"), pytest.raises(NotImplementedError, match="cannot run on"):
        _backends.choose(problem())


@pytest.mark.parametrize("rank", [3, 4])
def test_alignment(rank):
    """16 bytes are 8 elements of bf16: where the tensor begins, and every stride but the last."""
    x = torch.zeros(4, 8, 16, 24, dtype=torch.bfloat16)
    assert cuda._is_aligned(x[4 - rank]) if rank == 3 else cuda._is_aligned(x)
    shape = (3, 5, 2)[-rank + 1 :] if rank == 4 else (5, 2)
    for dim in range(rank - 1):
        strides = [1024, 256, 64][-(rank - 1) :]
        assert cuda._is_aligned(x.as_strided((*shape, 8), (*strides, 1)))
        strides[dim] += 4
        assert not cuda._is_aligned(x.as_strided((*shape, 8), (*strides, 1)))
    assert not cuda._is_aligned(x.as_strided((*shape, 8), (*[64] * (rank - 1), 1), 4))


def test_workspaces_kept_zero(monkeypatch):
    """One for each stream of a device, and for each CUDA graph, which may be replayed on any."""
    monkeypatch.setattr(cuda, "_kept_zeros", {})
    made = []

    def lasting_zeros(device, shape):
        made.append(shape)
        return made_by(shape, dtype=torch.int32)

    monkeypatch.setattr(cuda, "_lasting_zeros", lasting_zeros)
    made_by = torch.zeros
    owners = {0: 7, 1: 10, 2: 20, 3: -1, 4: -2, 5: None}
    extension = SimpleNamespace(zeros_owner=owners.get, KEPT_ZERO=8, GRAPH_SLOTS=2)
    monkeypatch.setattr(cuda, "_C", extension, raising=False)

    def zeros(stream):
        with monkeypatch.context() as patched:
            patched.setattr(torch, "zeros", lambda *a, device, **k: made_by(*a, **k))
            return cuda._kept_zero(0, stream)

    too_early = zeros(3)  # within the graph
    assert zeros(3) is not too_early and not made
    first, second = zeros(1), zeros(2)
    assert made == [(3, 8), (1, 8)]  # the graphs' with the first
    in_graphs = zeros(3), zeros(4)
    no_slot = zeros(5)
    by_default = zeros(0)
    assert zeros(1) is first and zeros(3) is in_graphs[0] and zeros(0) is by_default
    assert zeros(5) is not no_slot
    all_zeros = (too_early, first, second, *in_graphs, no_slot, by_default)
    assert len({x.data_ptr() for x in all_zeros}) == len(all_zeros)
    assert all(x.shape == (8,) and x.dtype == torch.int32 and not x.any() for x in all_zeros)
    owners[1] = 30  # the handle of a destroyed stream, used again
    assert zeros(1) is not first
    owners[0] = 40  # another green context is current: its default stream has the same handle
    assert zeros(0) is not by_default
