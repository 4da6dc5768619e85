"""examples/ run, and their checks fail where attention is broken."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SERVE = EXAMPLES / "serve.py"
SMALL = ["--requests", "5", "--batch", "2", "--prompt", "20", "--new", "6"]
LAYOUTS = [["--page-size", "1"], ["--page-size", "16"], ["--contiguous"]]


def run(name: str, *options: str) -> None:
    runpy.run_path(str(EXAMPLES / name))["main"](options)


def test_train(capsys):
    small = "--batch 4 --seqlen 64 --layers 1 --hidden 64".split()
    run("train.py", *small, "--steps", "30", "--dropout", "0.1")
    losses = [float(x) for x in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert losses[0] > 5 and losses[-1] < 4.5  # log(256) = 5.5


def test_packing(capsys):
    run("packing.py", "--batch", "3", "--longest", "90", "--heads", "2", "--check")
    assert "3 sequences of up to 90 tokens" in capsys.readouterr().out


def test_packing_finds_what_differs(monkeypatch):
    attend = flash_attn.flash_attn_varlen_func
    wrong: Callable[..., Tensor] = lambda *args, causal: attend(*args)  # noqa: E731
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", wrong)
    with pytest.raises(SystemExit, match="differ"):
        run("packing.py", "--batch", "3", "--longest", "90", "--heads", "2", "--check")


def serve(*options: str) -> None:
    runpy.run_path(str(SERVE))["main"]([*options, "--check"])


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_serve(layout, capsys):
    serve("--device", "cpu", *layout)
    out = capsys.readouterr().out
    assert "8 requests, " in out and "the same tokens one by one" in out


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_serve_on_the_gpu(layout):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    serve("--requests", "20", "--prompt", "700", "--new", "40", "--layers", "4", *layout)


def pages_of_another(arguments: dict[str, Any]) -> None:
    """The second sequence has the first one's pages."""
    arguments["block_table"] = arguments["block_table"][:1].expand(2, -1)


def few_keys(arguments: dict[str, Any]) -> None:
    arguments["window_size"] = (10, 0)


@pytest.mark.parametrize(
    "wrong, message",
    [(pages_of_another, "in the batch, .* alone"), (few_keys, "without a cache")],
)
def test_broken_attention_fails(wrong, message, monkeypatch):
    """Of a step: in the batch alone, or always."""
    attend: Callable[..., Tensor] = flash_attn.flash_attn_with_kvcache

    def broken(q: Tensor, *others: Tensor, **options: Any) -> Tensor:
        lengths = others[-1]
        if wrong is few_keys or (q.shape[1] == 1 and (lengths >= 0).sum() == 2):
            wrong(options)
        return attend(q, *others, **options)

    monkeypatch.setattr(flash_attn, "flash_attn_with_kvcache", broken)
    with pytest.raises(SystemExit, match=message):
        serve("--device", "cpu", *SMALL)
