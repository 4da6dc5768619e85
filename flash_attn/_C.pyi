from torch import Tensor

def forward(
    *,
    family: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    stream: int,
) -> None: ...
def instantiations() -> list[tuple[str, str, int, str]]: ...
