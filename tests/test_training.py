"""Training steps: a model is the same with every attention; the script writes what it says."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import since_torch
from test_benchmarks import DRAWS, run

from benchmarks import plots, training
from benchmarks.providers import Provider, find_providers
from benchmarks.training import Shape, attention_of, case_of

pytestmark = since_torch(2, 5, "scaled_dot_product_attention has enable_gqa")

SHAPES = training.MODELS["cpu"]
PROVIDERS = {**find_providers(), "standard": Provider(training.standard)}


@pytest.mark.parametrize("model", SHAPES)
def test_the_loss_and_its_gradients_are_the_same_with_every_attention(model):
    shape = SHAPES[model]
    case = case_of(model, shape, shape.seqlens[0], 100, "fp32")
    network, _ = training.start(shape, case.seqlen, "fp32", "cpu")
    batch = torch.randint(shape.vocabulary, (2, len(case.lengths), case.seqlen)).unbind()
    results = {}
    for name in ("math", "tiled", "flash", "standard"):
        # Hand-written attention has no groups: it gets repeated keys.
        trial = case._replace(group=1) if name == "standard" else case
        with PROVIDERS[name].context(trial):
            loss = network(*batch, attention_of(PROVIDERS[name], trial))
            grads = torch.autograd.grad(loss, list(network.parameters()))
        results[name] = [loss, *grads]
    for name, tensors in results.items():
        torch.testing.assert_close(tensors, results["math"], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_causal_models_see_no_later_token(model):
    shape = SHAPES[model]
    case = case_of(model, shape, 16, 16, "fp32")
    network, _ = training.start(shape, 16, "fp32", "cpu")
    attend = attention_of(PROVIDERS["tiled"], case)
    tokens = torch.arange(16)[None]
    ignored = -100  # cross_entropy leaves it out
    targets = torch.where(tokens < 8, tokens, ignored)
    changed = torch.where(tokens < 8, tokens, tokens + 100)
    assert network(tokens, targets, attend) == network(changed, targets, attend)


def test_flops_and_parameters_of_known_models():
    """As published: 124 M, 355 M, 1.3 G and 335 M parameters, without counting any twice."""
    published = {"gpt2-small": 124e6, "gpt2-medium": 355e6, "gpt-1.3b": 1.31e9, "bert-large": 335e6}
    for model, parameters in published.items():
        shape = training.MODELS["cuda"][model]
        with torch.device("meta"):
            network = training.Transformer(shape, shape.seqlens[0])
        assert sum(p.numel() for p in network.parameters()) == pytest.approx(parameters, rel=0.01)


def test_training(tmp_path, capsys):
    providers = ("tiled", "sm80", "math", "standard")
    rows = run(
        *(training.main, tmp_path, "training", "--tokens", "64", "--rounds", "1"),
        *("--sample-ms", "1", "--models", "bert", "llama", "--seqlen", "32", "96", "--peak", "2"),
        *("--providers", *providers, "--math-gib", "0.0005"),
    )
    assert [(row["model"], row["seqlen"], row["batch"]) for row in rows] == [
        ("bert", 32, 2),
        ("llama", 32, 2),
        ("llama", 96, 1),
    ]
    for row in rows:
        tokens = row["batch"] * row["seqlen"]
        pairs = tokens * row["seqlen"] / (2 if row["causal"] else 1)
        attention = 12 * row["layers"] * row["nheads"] * row["headdim"] * pairs
        assert row["flops"] == 6 * row["parameters"] * tokens + attention
        large = row["seqlen"] == 96  # 4 heads of 96 x 96 floats: of 8, in 1.125 MiB
        assert set(row["ms"]) == {"tiled"} | (set() if large else {"math", "standard"})
        assert set(row["skipped"]) == set(providers) - set(row["ms"])
        for name, ms in row["ms"].items():
            assert row["tokens_per_s"][name] == pytest.approx(tokens / ms * 1e3, rel=2e-3)
            assert row["mfu"][name] == pytest.approx(row["flops"] / ms / 2e9, rel=2e-3)
        assert row["backend"] == {"tiled": "tiled"} and not row["peak_gib"]
        grouped = row["model"] == "llama" and not large
        assert row["expanded"] == ({"standard": True} if grouped else {})
    assert "repeated keys" in capsys.readouterr().out
    assert (tmp_path / "training.png").exists() == DRAWS
    assert not (tmp_path / "training-memory.png").exists()


def test_losses(tmp_path, capsys):
    options = ["--losses", "12", "--tokens", "256", "--fp8", "balanced"]
    training.main([*options, "--folder", str(tmp_path)])
    rows = json.loads((tmp_path / "training-losses.json").read_text())["rows"]
    assert [row["step"] for row in rows] == list(range(12))
    first, last = rows[0]["loss"], rows[-1]["loss"]
    assert set(first) == {"tiled", "flash", "float32", "balanced"}
    for name in first:
        assert last[name] < first[name] - 0.2
        assert all(abs(row["loss"][name] - row["loss"]["float32"]) < 0.02 for row in rows)
    assert first["tiled"] != first["float32"]  # bf16 has other roundings
    assert any(row["loss"]["tiled"] != row["loss"]["balanced"] for row in rows)
    assert len((tmp_path / "training-losses.csv").read_text().splitlines()) == 1 + 12 * 4
    gap = max(abs(row["loss"]["tiled"] - row["loss"]["float32"]) for row in rows)
    printed = capsys.readouterr().out
    assert f"tiled in bf16: at most {gap:.4f} from float32" in printed
    gap = max(abs(row["loss"]["balanced"] - row["loss"]["tiled"]) for row in rows)
    assert f"balanced: at most {gap:.4f} from tiled in bf16" in printed
    assert (tmp_path / "training-losses.png").exists() == DRAWS


@pytest.mark.skipif(not DRAWS, reason="needs matplotlib")
def test_plots_of_a_gpu_have_memory_and_use():
    names = ("sm90", "flash", "cudnn", "efficient", "math", "standard")
    figures = {"tflops": dict.fromkeys(names, 300.0), "peak_gib": dict.fromkeys(names, 40.0)}
    rows = [
        {"model": model, "seqlen": seqlen, "dtype": "bf16", **figures}
        for model, shape in training.MODELS["cuda"].items()
        for seqlen in shape.seqlens
    ]
    environment = {"device": "no GPU", "arguments": {"peak": 989.0}}
    drawn = dict(plots.training({"environment": environment, "rows": rows}))
    assert list(drawn) == ["", "-memory"]
    assert all(len(figure.axes) == 2 for figure in drawn.values())  # models, lengths of the llama


def test_a_shape_says_what_the_model_computes():
    shape = Shape(1, 4, 8, (16,), group=2, inner=24, vocabulary=10, llama=True)
    network = training.Transformer(shape, 16)
    assert network.positions is None
    block = network.blocks[0]
    assert block.project_in.weight.shape == ((4 + 2 + 2) * 8, 32)
    assert block.up.weight.shape == (2 * 24, 32) and block.down.weight.shape == (32, 24)
    assert block.up.bias is None
