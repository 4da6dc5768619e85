"""Train a small language model on the bytes of a text.

    python examples/train.py                      # on the sources of this library
    python examples/train.py --text FILE --steps 1000

A GPT of a few layers with rotary embedding. Its attention is one call of flash_attn_func: forward
and backward take memory linear in the length, in 16 bits under autocast. Prints the loss in nats a
byte; log(256) = 5.5 is that of guessing.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_attn import flash_attn_func
from flash_attn.layers.rotary import RotaryEmbedding

HEADDIM = 64
SOURCES = Path(__file__).resolve().parent.parent / "flash_attn"


class Layer(nn.Module):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.rotary = RotaryEmbedding(HEADDIM)
        self.out = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:  # (batch, seqlen, hidden)
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, HEADDIM))
        q, k, v = self.rotary(qkv).unbind(2)  # (batch, seqlen, heads, HEADDIM) each
        dropout = self.dropout if self.training else 0.0
        x = x + self.out(flash_attn_func(q, k, v, dropout_p=dropout, causal=True).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, layers: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, hidden)
        self.layers = nn.ModuleList(Layer(hidden, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, seqlen) -> logits
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small language model on bytes.")
    add = parser.add_argument
    add("--text", type=Path, help="a file; default: the sources of this library")
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=16)
    add("--seqlen", type=int, default=512)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256, help=f"a multiple of {HEADDIM}")
    add("--dropout", type=float, default=0.0, help="of attention probabilities")
    a = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = [a.text] if a.text else sorted(SOURCES.rglob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(x.read_bytes() for x in files)), dtype=torch.uint8)

    torch.manual_seed(0)
    model = Gpt(a.layers, a.hidden, a.dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = time.perf_counter()
    for step in range(a.steps):
        first = torch.randint(len(text) - a.seqlen, (a.batch, 1))
        batch = text[first + torch.arange(a.seqlen + 1)].long().to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == a.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    tokens = a.steps * a.batch * a.seqlen
    print(f"{tokens / (time.perf_counter() - start):.0f} tokens/s")


if __name__ == "__main__":
    main()
