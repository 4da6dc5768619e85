"""Each wrong argument: the type of the exception, and a message with the argument and the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import NAN, cu_seqlens, int32, randn

import flash_attn
from flash_attn import _ops

Arguments = dict[str, Any]


def dense_arguments() -> Arguments:
    return {"q": randn(2, 5, 4, 8), "k": randn(2, 6, 2, 8), "v": randn(2, 6, 2, 8)}


def varlen_arguments() -> Arguments:
    return {
        "q": randn(10, 4, 8),
        "k": randn(12, 2, 8),
        "v": randn(12, 2, 8),
        "cu_seqlens_q": cu_seqlens([4, 6]),
        "cu_seqlens_k": cu_seqlens([5, 7]),
        "max_seqlen_q": 6,
        "max_seqlen_k": 7,
    }


def kvcache_arguments() -> Arguments:
    return {
        "q": randn(2, 1, 4, 8),
        "k_cache": randn(2, 10, 2, 8),
        "v_cache": randn(2, 10, 2, 8),
        "k": randn(2, 3, 2, 8),
        "v": randn(2, 3, 2, 8),
        "cache_seqlens": int32([2, 7]),
    }


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "dense": (flash_attn.flash_attn_func, dense_arguments),
    "varlen": (flash_attn.flash_attn_varlen_func, varlen_arguments),
    "kvcache": (flash_attn.flash_attn_with_kvcache, kvcache_arguments),
}


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([randn(6, 2, 8), randn(5, 2, 8)], layout=layout)


COS = torch.ones(20, 4)
ROTARY = {"rotary_cos": COS, "rotary_sin": COS}
PAGES, BOUNDS = randn(5, 4, 2, 8), cu_seqlens([3, 7])
NO_KEYS, NO_COLUMNS = randn(2, 0, 2, 8), randn(2, 6, 2, 0)
PAGED = {"k_cache": randn(5, 4, 2, 8), "v_cache": randn(5, 4, 2, 8)}

# What a call gets instead of its good arguments, the exception, and words of its message: first the
# argument, then what was given.
CASES: dict[str, list[tuple[Arguments, type[Exception], list[str]]]] = {
    "dense": [
        # Types, dtypes, devices
        ({"q": [1.0]}, TypeError, ["q", "list"]),
        ({"q": [1.0], "dropout_p": 0.1}, TypeError, ["q", "list"]),
        ({"k": None}, TypeError, ["k", "None"]),
        ({"v": 3}, TypeError, ["v", "int"]),
        ({"q": randn(2, 5, 4, 8).int()}, TypeError, ["q", "int32"]),
        ({"q": randn(2, 5, 4, 8).to(torch.complex64)}, TypeError, ["q", "complex64"]),
        (
            {name: randn(2, 5, 4, 8).to(torch.float8_e5m2) for name in "qkv"},
            TypeError,
            ["q", "float8_e4m3fn"],
        ),
        ({"k": randn(2, 6, 2, 8).half()}, TypeError, ["k", "float16", "float32"]),
        ({"v": randn(2, 6, 2, 8).double()}, TypeError, ["v", "float64", "float32"]),
        ({"k": randn(2, 6, 2, 8).to("meta")}, ValueError, ["k", "meta", "cpu"]),
        ({"v": randn(2, 6, 2, 8).to("meta")}, ValueError, ["v", "meta", "cpu"]),
        # Shapes
        ({"q": randn(5, 4, 8)}, ValueError, ["q", "(5, 4, 8)", "4"]),
        ({"k": randn(6, 2, 8)}, ValueError, ["k", "(6, 2, 8)", "4"]),
        ({"k": randn(3, 6, 2, 8), "v": randn(3, 6, 2, 8)}, ValueError, ["k", "(3, 6, 2, 8)", "2"]),
        ({"v": randn(2, 7, 2, 8)}, ValueError, ["v", "(2, 7, 2, 8)"]),
        ({"v": randn(2, 6, 1, 8)}, ValueError, ["v", "(2, 6, 1, 8)"]),
        ({"k": randn(2, 6, 2, 16)}, ValueError, ["k", "(2, 6, 2, 16)", "8"]),
        ({"k": randn(2, 6, 3, 8), "v": randn(2, 6, 3, 8)}, ValueError, ["k", "3", "4"]),
        ({"k": randn(2, 6, 0, 8), "v": randn(2, 6, 0, 8)}, ValueError, ["k", "0", "4"]),
        ({"q": randn(2, 5, 0, 8)}, ValueError, ["k", "that of q, 0", "got 2"]),
        ({"q": randn(2, 5, 4, 0), "k": NO_COLUMNS}, ValueError, ["q", "of at least 1", "got 0"]),
        ({"v": NO_COLUMNS}, ValueError, ["v", "of at least 1", "got 0"]),
        # Layouts without strides
        ({"q": randn(2, 5, 4, 8).to_sparse()}, TypeError, ["q", "torch.strided", "torch.sparse"]),
        ({"k": randn(2, 6, 2, 8).to_mkldnn()}, TypeError, ["k", "torch.strided", "mkldnn"]),
        ({"v": nested(torch.strided)}, TypeError, ["v", "torch.strided", "nested"]),
        ({"q": nested(torch.jagged)}, TypeError, ["q", "torch.strided", "nested"]),
        # Options
        ({"dropout_p": -0.1}, ValueError, ["dropout_p", "-0.1", "[0, 1)"]),
        ({"dropout_p": 1.0}, ValueError, ["dropout_p", "1.0", "[0, 1)"]),
        ({"dropout_p": NAN}, ValueError, ["dropout_p", "nan"]),
        ({"dropout_p": "0.1"}, TypeError, ["dropout_p", "str"]),
        ({"dropout_p": torch.ones(2)}, TypeError, ["dropout_p", "(2,)"]),
        ({"softmax_scale": -1.0}, ValueError, ["softmax_scale", "-1.0"]),
        ({"softmax_scale": NAN}, ValueError, ["softmax_scale", "nan"]),
        ({"softmax_scale": float("inf")}, ValueError, ["softmax_scale", "inf"]),
        ({"softmax_scale": "1"}, TypeError, ["softmax_scale", "str"]),
        ({"softcap": -5.0}, ValueError, ["softcap", "-5.0"]),
        ({"softcap": NAN}, ValueError, ["softcap", "nan"]),
        ({"softcap": 1e39}, ValueError, ["softcap", "1e+39", "at most 1e+30"]),
        ({"softcap": 1e-46}, ValueError, ["softcap", "1e-46", "at least 1e-30"]),
        ({"softmax_scale": 1e39}, ValueError, ["softmax_scale", "1e+39", "at most 1e+30"]),
        ({"softmax_scale": 10**400}, ValueError, ["softmax_scale", "finite", "1329 bits"]),
        ({"softmax_scale": True}, TypeError, ["softmax_scale", "bool"]),
        ({"softmax_scale": torch.ones(2)}, TypeError, ["softmax_scale", "(2,)"]),
        ({"dropout_p": True}, ValueError, ["dropout_p", "1.0", "[0, 1)"]),
        ({"dropout_p": 1j}, TypeError, ["dropout_p", "complex"]),
        ({"softcap": torch.ones((), requires_grad=True)}, ValueError, ["softcap", "gradient"]),
        ({"causal": "yes"}, TypeError, ["causal", "str"]),
        ({"causal": 1.0}, TypeError, ["causal", "float 1.0"]),
        ({"causal": torch.tensor(1.0)}, TypeError, ["causal", "float32"]),
        ({"causal": torch.ones(2).bool()}, TypeError, ["causal", "(2,)"]),
        ({"deterministic": "no"}, TypeError, ["deterministic", "str"]),
        ({"return_attn_probs": "no"}, TypeError, ["return_attn_probs", "str"]),
        ({"return_attn_probs": torch.ones(2)}, TypeError, ["return_attn_probs", "(2,)"]),
        ({"window_size": (True, 2)}, TypeError, ["window_size", "bool"]),
        ({"window_size": torch.tensor([1.5, 2])}, TypeError, ["window_size", "float32"]),
        ({"window_size": torch.ones(2, 2).int()}, TypeError, ["window_size", "(2,)"]),
        ({"window_size": 5}, (TypeError, ValueError), ["window_size", "5"]),
        ({"window_size": (1, 2, 3)}, ValueError, ["window_size", "(1, 2, 3)"]),
        ({"window_size": (1.5, 2)}, TypeError, ["window_size", "1.5"]),
        ({"s_aux": nested(torch.strided)}, TypeError, ["s_aux", "torch.strided", "nested"]),
        ({"alibi_slopes": [1.0] * 4}, TypeError, ["alibi_slopes", "list"]),
        ({"alibi_slopes": randn(4).half()}, TypeError, ["alibi_slopes", "float16", "float32"]),
        ({"alibi_slopes": randn(3)}, ValueError, ["alibi_slopes", "(3,)", "(4,)", "(2, 4)"]),
        ({"alibi_slopes": randn(4, 2)}, ValueError, ["alibi_slopes", "(4, 2)", "(2, 4)"]),
        ({"alibi_slopes": randn(4).to("meta")}, ValueError, ["alibi_slopes", "meta", "cpu"]),
        ({"s_aux": randn(2)}, ValueError, ["s_aux", "(2,)", "(4,)"]),
        ({"s_aux": int32([1] * 4)}, TypeError, ["s_aux", "int32"]),
        ({"s_aux": randn(4).to("meta")}, ValueError, ["s_aux", "meta", "cpu"]),
        ({"alibi_slopes": randn(4).to_sparse()}, TypeError, ["alibi_slopes", "torch.sparse"]),
        ({"s_aux": randn(4).to_sparse()}, TypeError, ["s_aux", "torch.sparse"]),
        ({"out": randn(2, 5, 4, 9)}, ValueError, ["out", "(2, 5, 4, 9)", "(2, 5, 4, 8)"]),
        ({"out": randn(2, 5, 4, 8).half()}, TypeError, ["out", "float16", "float32"]),
        ({"out": randn(2, 5, 4, 8).to("meta")}, ValueError, ["out", "meta", "cpu"]),
        (
            {"out": randn(2, 5, 4, 8), "q": randn(2, 5, 4, 8).requires_grad_()},
            ValueError,
            ["out", "gradient"],
        ),
    ],
    "varlen": [
        ({"q": randn(2, 5, 4, 8)}, ValueError, ["q", "(2, 5, 4, 8)", "3"]),
        ({"k": randn(1, 12, 2, 8)}, ValueError, ["k", "(1, 12, 2, 8)", "3"]),
        ({"cu_seqlens_q": [0, 4, 10]}, TypeError, ["cu_seqlens_q", "list"]),
        ({"cu_seqlens_q": cu_seqlens([4, 6]).long()}, TypeError, ["cu_seqlens_q", "int64"]),
        ({"cu_seqlens_k": cu_seqlens([5, 7]).float()}, TypeError, ["cu_seqlens_k", "float32"]),
        ({"cu_seqlens_k": cu_seqlens([12])}, ValueError, ["cu_seqlens_k", "(2,)", "(3,)"]),
        ({"cu_seqlens_q": int32([[0, 10]])}, ValueError, ["cu_seqlens_q", "(1, 2)"]),
        ({"cu_seqlens_q": int32([])}, ValueError, ["cu_seqlens_q", "(0,)"]),
        ({"cu_seqlens_q": cu_seqlens([4, 6]).to("meta")}, ValueError, ["cu_seqlens_q", "meta"]),
        ({"max_seqlen_q": 6.0}, TypeError, ["max_seqlen_q", "float"]),
        ({"max_seqlen_k": None}, TypeError, ["max_seqlen_k", "None"]),
        ({"max_seqlen_k": -1}, ValueError, ["max_seqlen_k", "-1"]),
        ({"max_seqlen_q": torch.tensor(9.9)}, TypeError, ["max_seqlen_q", "float32"]),
        ({"max_seqlen_q": torch.tensor(True)}, TypeError, ["max_seqlen_q", "bool"]),
        ({"max_seqlen_q": True}, TypeError, ["max_seqlen_q", "bool"]),
        ({"max_seqlen_k": int32([7, 7])}, TypeError, ["max_seqlen_k", "(2,)"]),
        # What lies on the CPU is read
        ({"cu_seqlens_q": int32([-1, 4, 10])}, ValueError, ["cu_seqlens_q", "0", "-1"]),
        ({"cu_seqlens_q": int32([0, 6, 4])}, ValueError, ["cu_seqlens_q", "4 after 6"]),
        ({"cu_seqlens_q": int32([0, 6, 11])}, ValueError, ["cu_seqlens_q", "10", "11"]),
        ({"cu_seqlens_k": int32([0, 7, 13])}, ValueError, ["cu_seqlens_k", "12", "13"]),
        ({"max_seqlen_q": 5}, ValueError, ["max_seqlen_q", "6", "5"]),
        ({"max_seqlen_k": 6}, ValueError, ["max_seqlen_k", "7", "6"]),
        (
            {"k": PAGES, "v": PAGES, "block_table": int32([[0], [1]]), "cu_seqlens_k": BOUNDS},
            ValueError,
            ["block_table", "7 rows", "1 of 4 rows"],
        ),
        (
            {
                "k": PAGES,
                "v": PAGES,
                "block_table": int32([[0, 1], [2, 5]]),
                "cu_seqlens_k": BOUNDS,
            },
            ValueError,
            ["block_table", "0 .. 4", "got 5"],
        ),
        ({"alibi_slopes": randn(3, 4)}, ValueError, ["alibi_slopes", "(3, 4)", "(2, 4)"]),
        (
            {"k": randn(3, 8, 2, 8), "v": randn(3, 8, 2, 8), "block_table": int32([[0]])},
            ValueError,
            ["block_table", "(1, 1)"],
        ),
        (
            {"k": randn(3, 8, 2, 8), "v": randn(3, 8, 2, 8), "block_table": int32([0, 1])},
            ValueError,
            ["block_table", "(2,)"],
        ),
        (
            {
                "k": randn(3, 8, 2, 8),
                "v": randn(3, 8, 2, 8),
                "block_table": int32([[0], [1]]).long(),
            },
            TypeError,
            ["block_table", "int64"],
        ),
        ({"block_table": int32([[0], [1]])}, ValueError, ["k", "(12, 2, 8)", "4"]),
    ],
    "kvcache": [
        ({"k_cache": randn(10, 2, 8)}, ValueError, ["k_cache", "(10, 2, 8)", "4"]),
        ({"v_cache": randn(2, 10, 2, 8).half()}, TypeError, ["v_cache", "float16"]),
        ({"v_cache": randn(2, 9, 2, 8)}, ValueError, ["v_cache", "(2, 9, 2, 8)"]),
        (
            {"k_cache": randn(3, 10, 2, 8), "v_cache": randn(3, 10, 2, 8)},
            ValueError,
            ["k_cache", "(3, 10, 2, 8)", "cache_batch_idx"],
        ),
        # Appending
        ({"v": None}, ValueError, ["v", "None", "k"]),
        ({"k": None}, ValueError, ["k", "None", "v"]),
        ({"k": randn(2, 3, 1, 8)}, ValueError, ["k", "(2, 3, 1, 8)", "(2, 3, 2, 8)"]),
        ({"v": randn(2, 4, 2, 8)}, ValueError, ["v", "(2, 4, 2, 8)", "(2, 3, 2, 8)"]),
        ({"k": randn(2, 3, 2, 8).half()}, TypeError, ["k", "float16", "float32"]),
        ({"cache_seqlens": None}, ValueError, ["cache_seqlens", "None"]),
        ({"cache_seqlens": 8}, ValueError, ["k_cache", "8", "3", "10"]),
        ({"cache_seqlens": int32([2, 8])}, ValueError, ["k_cache", "8", "3", "10"]),
        ({"cache_seqlens": 11, "k": None, "v": None}, ValueError, ["k_cache", "11", "10"]),
        ({"cache_seqlens": 2.0}, TypeError, ["cache_seqlens", "float"]),
        ({"cache_seqlens": torch.tensor([2, 7])}, TypeError, ["cache_seqlens", "int64"]),
        ({"cache_seqlens": int32([2])}, ValueError, ["cache_seqlens", "(1,)", "(2,)"]),
        ({"cache_seqlens": int32([2, 7]).to_sparse()}, TypeError, ["cache_seqlens", "sparse"]),
        ({"q": randn(2, 1, 0, 8)}, ValueError, ["k_cache", "that of q, 0", "got 2"]),
        ({"alibi_slopes": randn(4).to_sparse()}, TypeError, ["alibi_slopes", "torch.sparse"]),
        ({"k_cache": randn(2, 2, 8, 10).mT.transpose(1, 2)}, ValueError, ["k_cache", "strides"]),
        # Where the cache is
        ({"cache_batch_idx": int32([0, 2])}, ValueError, ["cache_batch_idx", "0 .. 1", "got 2"]),
        ({"cache_leftpad": int32([0, -3])}, ValueError, ["cache_leftpad", "0", "-3"]),
        (
            {"block_table": int32([[0, 1, 2], [3, 4, 9]])} | PAGED,
            ValueError,
            ["block_table", "0 .. 4", "got 9"],
        ),
        ({"cache_batch_idx": int32([0])}, ValueError, ["cache_batch_idx", "(1,)", "(2,)"]),
        ({"cache_batch_idx": torch.tensor([0, 1])}, TypeError, ["cache_batch_idx", "int64"]),
        ({"cache_leftpad": int32([0])}, ValueError, ["cache_leftpad", "(1,)", "(2,)"]),
        ({"cache_leftpad": 1}, TypeError, ["cache_leftpad", "int"]),
        (
            {"cache_batch_idx": int32([0, 1]), "block_table": int32([[0, 1, 2], [3, 4, 0]])}
            | PAGED,
            ValueError,
            ["cache_batch_idx", "block_table"],
        ),
        (
            {"block_table": int32([[0, 1, 2]])} | PAGED,
            ValueError,
            ["block_table", "(1, 3)", "(2, 3)"],
        ),
        (
            {"block_table": int32([[0, 1], [3, 4]])} | PAGED,
            ValueError,
            ["k_cache", "7", "3", "8"],
        ),
        (
            {"block_table": int32([[0], [1]]), "k_cache": NO_KEYS, "v_cache": NO_KEYS},
            ValueError,
            ["k", "pages of at least 1 row", "(2, 0, 2, 8)"],
        ),
        # Rotary
        ({"rotary_cos": COS}, ValueError, ["rotary_sin", "None"]),
        ({"rotary_sin": COS}, ValueError, ["rotary_cos", "None"]),
        ({"k": None, "v": None} | ROTARY, ValueError, ["k", "rotary_cos", "None"]),
        (
            {"rotary_cos": COS, "rotary_sin": COS, "cache_seqlens": None},
            ValueError,
            ["cache_seqlens", "None"],
        ),
        (
            {"rotary_cos": COS, "rotary_sin": COS, "k": None, "v": None, "cache_seqlens": None},
            ValueError,
            ["cache_seqlens", "None"],
        ),
        (
            {"rotary_cos": COS, "rotary_sin": COS[:, :2]},
            ValueError,
            ["rotary_sin", "(20, 2)", "(20, 4)"],
        ),
        (
            {"rotary_cos": torch.ones(20, 5), "rotary_sin": torch.ones(20, 5)},
            ValueError,
            ["rotary_cos", "(20, 5)", "8"],
        ),
        (
            {"rotary_cos": COS[:9], "rotary_sin": COS[:9]},
            ValueError,
            ["rotary_cos", "(9, 4)", "10"],
        ),
        (  # queries without a mask stand at the row of the next key, though none is appended
            {"rotary_cos": COS[:7], "rotary_sin": COS[:7], "k": NO_KEYS, "v": NO_KEYS},
            ValueError,
            ["rotary_cos", "(7, 4)", "8"],
        ),
        (
            {
                "rotary_cos": COS[:0],
                "rotary_sin": COS[:0],
                "cache_seqlens": -1,
                "k": NO_KEYS,
                "v": NO_KEYS,
            },
            ValueError,
            ["rotary_cos", "(0, 4)", "1"],
        ),
        (
            {
                "rotary_cos": COS[:10],
                "rotary_sin": COS[:10],
                "q": randn(2, 5, 4, 8),
                "causal": True,
            },
            ValueError,
            ["rotary_cos", "(10, 4)", "12"],  # the last query is token 7 + 4
        ),
        ({"rotary_cos": COS.half(), "rotary_sin": COS}, TypeError, ["rotary_cos", "float16"]),
        ({"num_splits": -1}, ValueError, ["num_splits", "-1"]),
        ({"num_splits": 1.0}, TypeError, ["num_splits", "float"]),
        ({"return_softmax_lse": "no"}, TypeError, ["return_softmax_lse", "str"]),
        ({"rotary_interleaved": "no"} | ROTARY, TypeError, ["rotary_interleaved", "str"]),
    ],
}


@pytest.mark.parametrize(
    "name, changes, exception, words",
    [
        pytest.param(name, *case, id=f"{name}-{'-'.join(case[0])}-{case[2][1]}")
        for name, cases in CASES.items()
        for case in cases
    ],
)
def test_bad_argument(name, changes, exception, words):
    function, arguments = CALLS[name]
    with pytest.raises(exception) as error:
        function(**arguments() | changes)
    message = str(error.value)
    assert message.startswith(words[0]), message
    for word in words[1:]:
        assert word in message, f"{word!r} is not in {message!r}"


@pytest.mark.parametrize(
    "name, good, bad", [("softmax_scale", 1.0, True), ("causal", True, 1.0)], ids=str
)
def test_bad_argument_that_equals_a_good_one(name, good, bad):
    """Options that were right are remembered."""
    flash_attn.flash_attn_func(**dense_arguments() | {name: good})
    with pytest.raises(TypeError, match=name):
        flash_attn.flash_attn_func(**dense_arguments() | {name: bad})


@pytest.mark.parametrize("name", CALLS)
def test_good_arguments_pass(name):
    function, arguments = CALLS[name]
    function(**arguments())


@pytest.mark.parametrize(
    "name, packed",
    [
        ("flash_attn_qkvpacked_func", randn(2, 5, 2, 4, 8)),
        ("flash_attn_qkvpacked_func", randn(5, 3, 4, 8)),
    ],
)
def test_bad_packing(name, packed):
    with pytest.raises(ValueError, match=r"^qkv .*got shape"):
        getattr(flash_attn, name)(packed)


def test_no_tensor_is_packed():
    with pytest.raises(TypeError, match="^qkv must be a torch.Tensor, got list"):
        flash_attn.flash_attn_qkvpacked_func([1.0])


def test_bad_kv_packing():
    with pytest.raises(ValueError, match=r"^kv .*got shape \(2, 5, 3, 4, 8\)"):
        flash_attn.flash_attn_kvpacked_func(randn(2, 5, 4, 8), randn(2, 5, 3, 4, 8))


@pytest.mark.parametrize("length", [-1, -9])
def test_pages_that_no_row_lies_in_are_not_looked_at(length):
    """Of a row that pads a batch (length -1, or any below 0) neither pages nor slot count."""
    arguments = kvcache_arguments() | {"cache_seqlens": int32([length, 5])}
    table = int32([[-1, -1, -1], [3, 4, 99]])
    flash_attn.flash_attn_with_kvcache(**arguments | PAGED | {"block_table": table})
    slots = {"cache_batch_idx": int32([-7, 1])}
    flash_attn.flash_attn_with_kvcache(**arguments | slots)
    no_keys = {"k": None, "v": None, "cache_seqlens": int32([0, 5])}
    flash_attn.flash_attn_with_kvcache(**arguments | slots | no_keys)


@pytest.mark.parametrize("no_page", [-1, 99])
def test_pages_of_padding_are_not_looked_at(no_page):
    """Nor those whose rows are all before the first key."""
    arguments = kvcache_arguments() | PAGED
    arguments |= {"cache_seqlens": int32([6, 7]), "cache_leftpad": int32([5, 0])}
    outs = [
        flash_attn.flash_attn_with_kvcache(
            **arguments | {"block_table": int32([[page, 1, 2], [3, 4, 0]])}
        )
        for page in (0, no_page)
    ]
    assert torch.equal(*outs)


def test_rotary_tables_that_are_just_long_enough():
    """All queries without a mask stand at the row of the next key."""
    arguments = kvcache_arguments() | {"q": randn(2, 5, 4, 8)}
    arguments |= {"k": randn(2, 1, 2, 8), "v": randn(2, 1, 2, 8)}
    arguments |= {"rotary_cos": COS[:8], "rotary_sin": COS[:8]}
    flash_attn.flash_attn_with_kvcache(**arguments)


def test_lengths_in_use():
    """max_seqlen_k bounds the keys that take part: less than cu_seqlens_k where others do not."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward as forward

    arguments = varlen_arguments() | {"dropout_p": 0.0, "softmax_scale": None, "causal": False}
    forward(**arguments | {"seqused_k": int32([5, 6]), "max_seqlen_k": 6})
    forward(**arguments | {"leftpad_k": int32([0, 2]), "max_seqlen_k": 7})
    for more, words in (
        ({"seqused_k": int32([5, 8])}, "seqused_k .* 7 for sequence 1, got 8"),
        ({"leftpad_k": int32([-1, 0])}, "leftpad_k .*at least 0, got -1"),
        ({"seqused_k": int32([5, 7]), "max_seqlen_k": 6}, "max_seqlen_k .* 7, got 6"),
        ({"leftpad_k": int32([0, 2]), "max_seqlen_k": 5}, "max_seqlen_k .* 7, got 5"),
    ):
        with pytest.raises(ValueError, match=words):
            forward(**arguments | more)


@pytest.mark.parametrize("garbage", [[9, -5, 2], [0, 0, 0]], ids=str)
def test_pages_of_lengths_in_use_need_no_bounds(garbage):
    """Clients give any memory as cu_seqlens_k then."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward as forward

    arguments = varlen_arguments() | {"dropout_p": 0.0, "softmax_scale": None, "causal": False}
    arguments |= {"k": PAGES, "v": PAGES, "block_table": int32([[0, 1], [2, 3]])}
    expected, *_ = forward(**arguments | {"cu_seqlens_k": BOUNDS})
    arguments |= {"cu_seqlens_k": int32(garbage), "seqused_k": int32([3, 7])}
    out, *_ = forward(**arguments)
    assert torch.equal(out, expected)


def test_lengths_of_problems_fit_32_bits():
    arguments = varlen_arguments() | {"max_seqlen_q": 2**40, "max_seqlen_k": 2**31}
    arguments |= {"dropout_p": 0.0, "softmax_scale": None, "causal": False}
    problem = _ops._varlen_problem(**arguments)
    assert problem.max_seqlen_q == problem.max_seqlen_k == 2**31 - 1


def test_an_error_leaves_the_cache_as_it_was():
    arguments = kvcache_arguments() | {"cache_seqlens": int32([2, 8])}
    before = arguments["k_cache"].clone()
    with pytest.raises(ValueError):
        flash_attn.flash_attn_with_kvcache(**arguments)
    assert torch.equal(arguments["k_cache"], before)


def in_inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize(
    "words, change",
    [
        ("out is .*expanded", lambda a: {"out": a["q"][:, :, :1].expand_as(a["q"])}),
        ("out is .*gradient", lambda a: {"out": a["q"].clone().requires_grad_()}),
        ("out is .*inference", lambda a: {"out": in_inference(a["q"])}),
        ("k_cache is .*expanded", lambda a: {"k_cache": a["k_cache"][:1].expand_as(a["k_cache"])}),
        ("v_cache is .*inference", lambda a: {"v_cache": in_inference(a["v_cache"])}),
        ("cache_batch_idx .*once", lambda a: {"cache_batch_idx": int32([1, 1])}),
    ],
)
def test_what_cannot_be_written_leaves_the_cache_as_it_was(words, change):
    arguments = kvcache_arguments()
    arguments |= change(arguments)
    caches = [arguments[name] for name in ("k_cache", "v_cache")]
    before = [x.clone() for x in caches]
    with pytest.raises(ValueError, match=words):
        flash_attn.flash_attn_with_kvcache(**arguments)
    assert all(torch.equal(x, y) for x, y in zip(caches, before, strict=True))


@pytest.mark.parametrize("tracked", [False, True])
def test_out_may_be_a_view_that_autograd_does_not_write(tracked):
    """Autograd refuses such views, which would be behind the append: it has no part in this."""
    arguments = kvcache_arguments()
    expected = flash_attn.flash_attn_with_kvcache(**arguments)
    arguments["q"].requires_grad_(tracked)
    base = torch.empty(4, *expected.shape, requires_grad=True)
    for out in (base[:2][0], base[2:].clone().unbind(0)[0]):
        with torch.set_grad_enabled(tracked):
            assert flash_attn.flash_attn_with_kvcache(**arguments, out=out) is out
        assert torch.equal(out, expected)


def test_windows_beyond_any_length():
    arguments = kvcache_arguments()
    expected = flash_attn.flash_attn_with_kvcache(**arguments)
    for size in (2**31, 2**63, 2**70):
        window = {"window_size": (size, size)}
        out = flash_attn.flash_attn_with_kvcache(**arguments | window)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("length", [-1, -(2**33), -(2**70)])
@pytest.mark.parametrize("tracked", [False, True])
def test_any_length_below_zero_is_a_row_not_in_use(length, tracked):
    arguments = kvcache_arguments() | {"cache_seqlens": length}
    arguments["q"].requires_grad_(tracked)
    before = arguments["k_cache"].clone()
    assert (flash_attn.flash_attn_with_kvcache(**arguments) == 0).all()
    assert torch.equal(arguments["k_cache"], before)


def test_gradients_of_empty_tensors():
    """Their strides may be zeros, as of what was expanded."""
    q, k = ((randn(2, n, 1, 8) * 1).requires_grad_() for n in (0, 5))
    for first, second in ((q, k), (k, q)):
        out = flash_attn.flash_attn_func(first, second, second)
        grads = torch.autograd.grad(out.sum(), (first, second))
        assert all((x == 0).all() for x in grads)


@pytest.mark.parametrize("pages", [False, True])
def test_what_has_no_gradient(pages):
    arguments = varlen_arguments() if pages else dense_arguments()
    arguments["q"].requires_grad_()
    words = "alibi_slopes has no gradient"
    if pages:
        arguments |= {"k": PAGES, "v": PAGES, "cu_seqlens_k": BOUNDS, "max_seqlen_k": 7}
        arguments["block_table"] = int32([[0, 1], [2, 3]])
        words = "block_table has no backward"
    else:
        arguments["alibi_slopes"] = torch.rand(4, requires_grad=True)
    out = CALLS["varlen" if pages else "dense"][0](**arguments)
    with pytest.raises(NotImplementedError, match=words):
        out.sum().backward()


def test_length_of_more_than_32_bits():
    arguments = kvcache_arguments() | {"cache_seqlens": 2**40}
    with pytest.raises(ValueError, match="k_cache must have room"):
        flash_attn.flash_attn_with_kvcache(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v", "alibi_slopes"])
def test_cpu_and_gpu_mixed(name):
    arguments = dense_arguments() | {"alibi_slopes": torch.ones(4)}
    arguments = {n: x.cuda() if n == name else x for n, x in arguments.items()}
    with pytest.raises(ValueError, match="cuda:0.*cpu|cpu.*cuda:0"):
        flash_attn.flash_attn_func(**arguments)


@pytest.mark.parametrize(
    "words, change",
    [
        (["dq", "(2, 5, 4, 9)"], {"dq": randn(2, 5, 4, 9)}),
        (["dv", "float16"], {"dv": randn(2, 6, 2, 8).half()}),
        (["dout", "(2, 5, 4, 7)"], {"dout": randn(2, 5, 4, 7)}),
        (["softmax_lse", "float64"], {"softmax_lse": randn(2, 4, 5).double()}),
        (["softmax_lse", "(2, 5, 4)"], {"softmax_lse": randn(2, 5, 4)}),
        (["rng_state", "None"], {"dropout_p": 0.1}),
        (["rng_state", "(1,)"], {"dropout_p": 0.1, "rng_state": torch.zeros(1).long()}),
        (["rng_state", "float32"], {"dropout_p": 0.1, "rng_state": torch.zeros(2)}),
        (["dk", "expanded"], {"dk": randn(2, 6, 1, 8).expand(-1, -1, 2, -1)}),
    ],
)
def test_bad_backward_arguments(words, change):
    from flash_attn.flash_attn_interface import _flash_attn_backward

    arguments = dense_arguments()
    arguments |= {"dout": randn(2, 5, 4, 8), "out": randn(2, 5, 4, 8)}
    arguments |= {f"d{name}": torch.empty_like(arguments[name]) for name in "qkv"}
    arguments |= {"softmax_lse": randn(2, 4, 5), "dropout_p": 0.0, "softmax_scale": 1.0}
    arguments |= {"causal": False, "window_size_left": -1, "window_size_right": -1}
    arguments |= {"softcap": 0.0, "alibi_slopes": None, "deterministic": False}
    with pytest.raises((TypeError, ValueError)) as error:
        _flash_attn_backward(**arguments | change)
    assert all(word in str(error.value) for word in words), error.value


def test_packed_tensors_without_strides():
    tensors = [randn(n, 3, 2, 8) for n in (5, 4)]
    qkv = torch.nested.nested_tensor(tensors, layout=torch.jagged)
    with pytest.raises(TypeError, match="qkv must be a dense tensor .* got a nested tensor"):
        flash_attn.flash_attn_qkvpacked_func(qkv)
