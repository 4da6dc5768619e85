"""The MLP of a transformer block: plain, gated, and under the name of upstream's fused one."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn.ops.activations import gelu_fwd, sqrelu_fwd

__all__ = ["FusedMLP", "GatedMlp", "Mlp"]

Activation = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """Two linear layers with an activation between them.

    Parameters
    ----------
    in_features : int
    hidden_features : int, optional
        4 * in_features if None.
    out_features : int, optional
        in_features if None.
    activation : callable
        From the output of the first layer to the input of the second.
    bias1, bias2 : bool
        Whether the layers have a bias.
    return_residual : bool
        Return (y, x), the output and the input, for a residual connection.
    device, dtype
        Of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = F.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_features is None:
            hidden_features = 4 * in_features
        if out_features is None:
            out_features = in_features
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, hidden_features, bias1, device, dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden_features, out_features, bias2, device, dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return y (..., out_features) of x (..., in_features), or (y, x)."""
        y = self.fc2(self.activation(self.fc1(x)))
        return (y, x) if self.return_residual else y


class GatedMlp(nn.Module):
    """An MLP whose hidden channels are multiplied by the activation of as many gates.

    With the default activation this is a gated linear unit, with ``F.silu`` it is SwiGLU.

    Parameters
    ----------
    in_features : int
    hidden_features : int, optional
        8 / 3 * in_features if None, rounded down; then rounded up to a multiple of
        ``multiple_of``, whether given or not.
    out_features : int, optional
        in_features if None.
    activation : callable
        Of the gates, which are the second half of the first layer's output.
    bias1, bias2 : bool
        Whether the layers have a bias.
    multiple_of : int
    return_residual, device, dtype
        See :class:`Mlp`.

    References
    ----------
    Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_features is None:
            hidden_features = int(8 * in_features / 3)
        if out_features is None:
            out_features = in_features
        hidden_features = -(-hidden_features // multiple_of) * multiple_of
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, 2 * hidden_features, bias1, device, dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden_features, out_features, bias2, device, dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return y (..., out_features) of x (..., in_features), or (y, x)."""
        values, gates = self.fc1(x).chunk(2, dim=-1)
        y = self.fc2(values * self.activation(gates))
        return (y, x) if self.return_residual else y


_ACTIVATIONS: dict[str, Activation] = {
    "gelu_approx": gelu_fwd,
    "relu": F.relu,
    "sqrelu": sqrelu_fwd,
}


class FusedMLP(Mlp):
    """:class:`Mlp` with upstream's arguments for a fused MLP. PyTorch operations compute it.

    Parameters
    ----------
    in_features, hidden_features, out_features, bias1, bias2, return_residual, device, dtype
        See :class:`Mlp`.
    activation : {"gelu_approx", "relu", "sqrelu"}
        GELU in its tanh form, ReLU, or its square.
    checkpoint_lvl : {0, 1, 2}
        What the backward computes again instead of keeping it: nothing, the activation's output,
        or its input as well.
    heuristic : optional
        Accepted for compatibility: chose upstream's matrix product.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {list(_ACTIVATIONS)}, got {activation!r}")
        if checkpoint_lvl not in (0, 1, 2):
            raise ValueError(f"checkpoint_lvl must be 0, 1 or 2, got {checkpoint_lvl!r}")
        super().__init__(
            in_features,
            hidden_features,
            out_features,
            _ACTIVATIONS[activation],
            bias1,
            bias2,
            return_residual,
            device,
            dtype,
        )
        self.checkpoint_lvl = checkpoint_lvl

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return y (..., out_features) of x (..., in_features), or (y, x)."""
        if self.checkpoint_lvl == 0:
            return super().forward(x)
        if self.checkpoint_lvl == 1:
            y = checkpoint(self._after_fc1, self.fc1(x), use_reentrant=False)
        else:
            y = checkpoint(lambda x: self._after_fc1(self.fc1(x)), x, use_reentrant=False)
        return (y, x) if self.return_residual else y

    def _after_fc1(self, hidden: Tensor) -> Tensor:
        return self.fc2(self.activation(hidden))
