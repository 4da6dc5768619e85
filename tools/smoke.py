"""Whether an installed wheel works without CUDA: forward and backward beside PyTorch's."""

import sys

import torch

import flash_attn
from flash_attn import _C

assert flash_attn.__file__.startswith(sys.prefix), flash_attn.__file__  # not a source tree
assert len(_C.kernels()) > 200, len(_C.kernels())
qkv = torch.randn(3, 2, 70, 4, 64, requires_grad=True)
out = flash_attn.flash_attn_func(qkv[0], qkv[1], qkv[2], causal=True)
q, k, v = qkv.transpose(2, 3)
sdpa = torch.nn.functional.scaled_dot_product_attention
expected = sdpa(q, k, v, is_causal=True).transpose(1, 2)
torch.testing.assert_close(out, expected)
dout = torch.randn_like(out)
torch.testing.assert_close(*(torch.autograd.grad(x, qkv, dout) for x in (out, expected)))
print(
    f"Python {sys.version.split()[0]}, torch {torch.__version__}: {len(_C.kernels())} kernels,",
    f"flash-attn {flash_attn.__version__}, on a CPU {flash_attn.available_backends('cpu')}",
)
