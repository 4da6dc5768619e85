"""What the library has to compute, written to be believed rather than to be fast.

Every attention here is one dense matrix of scores for each sequence, in float64, with plain Python
indexing to find the rows of a sequence, and gradients by autograd. Whatever the library runs on,
this runs on the CPU, but for large problems of a GPU. Nothing is imported from the library. The
same code in the input's dtype says how much rounding naive arithmetic costs, and so how far from
the oracle the library may be. (In float64 that is no measure, since it gives the oracle itself:
there, naive arithmetic is taken to be off by one unit in the last place.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# Where the rows of a sequence are stored
# --------------------------------------------------------------------------------------------------

# From so many scores on the CPU takes longer than the rest of a test.
MANY_SCORES = 2**19

# The leading indices of one row: (batch, position), (token,) or (page, slot).
Place = tuple[int, ...]


def on_host(x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if x is None else x.detach().to("cpu", dtype)


def index_of(x: Tensor, places: list[Place]) -> tuple[Tensor, ...]:
    """The places as index tensors, so that x[index_of(x, places)] is (len(places), heads, dim)."""
    return torch.tensor(places, dtype=torch.long).reshape(len(places), x.dim() - 2).unbind(1)


@dataclass
class Storage:
    """Where the keys of each sequence are; the names and meanings are the library's.

    k is dense (batch, capacity, heads, dim), or varlen (total, heads, dim) with cu_seqlens, or
    pages (num_pages, page_size, heads, dim) with block_table.
    """

    cu_seqlens: Tensor | None = None
    seqused: Tensor | None = None
    leftpad: Tensor | None = None
    block_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None

    def on_host(self) -> Storage:
        return Storage(**{name: on_host(value) for name, value in vars(self).items()})

    def place(self, k: Tensor, b: int, position: int) -> Place:
        """Where the given storage position of sequence b is."""
        if self.block_table is not None:
            page_size = k.shape[1]
            return int(self.block_table[b, position // page_size]), position % page_size
        if self.cu_seqlens is not None:
            return (int(self.cu_seqlens[b]) + position,)
        if self.cache_batch_idx is not None:
            return int(self.cache_batch_idx[b]), position
        return b, position

    def keys(self, k: Tensor, b: int) -> list[Place]:
        """Where the keys of sequence b are, first to last."""
        if self.seqused is not None:
            end = int(self.seqused[b])
        elif self.cu_seqlens is not None:
            end = int(self.cu_seqlens[b + 1] - self.cu_seqlens[b])
        else:
            pages = 1 if self.block_table is None else self.block_table.shape[1]
            end = pages * k.shape[1]
        start = 0 if self.leftpad is None else int(self.leftpad[b])
        return [self.place(k, b, position) for position in range(start, end)]


# --------------------------------------------------------------------------------------------------
# Attention
# --------------------------------------------------------------------------------------------------


@dataclass
class Attention:
    """One attention problem. Options have the library's names and meanings.

    `keep` (batch, nheads, seqlen_q, seqlen_k) is dropout's mask.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    storage: Storage = field(default_factory=Storage)
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    chunk: int = 0  # queries see the keys of their own chunk of so many positions; 0: all
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    keep: Tensor | None = None
    s_aux: Tensor | None = None
    # (batch, heads of k): what the elements of k and v of each sequence are multiplied by.
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def group(self) -> int:
        """How many query heads read each key head."""
        return self.q.shape[-2] // max(self.k.shape[-2], 1)

    @property
    def kv_head(self) -> list[int]:
        """The key head that each query head reads."""
        return [h // self.group for h in range(self.q.shape[-2])]

    def queries(self) -> list[list[Place]]:
        """Where the rows of each sequence are in q, out and dout."""
        if self.cu_seqlens_q is None:
            batch, seqlen_q = self.q.shape[:2]
            return [[(b, i) for i in range(seqlen_q)] for b in range(batch)]
        bounds = itertools.pairwise(self.cu_seqlens_q.tolist())
        return [[(row,) for row in range(start, end)] for start, end in bounds]

    def sequences(self) -> Iterator[tuple[int, tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Each sequence's number, where its rows are in q, and where its keys are in k and v."""
        storage = self.storage.on_host()
        for b, rows in enumerate(self.queries()):
            yield b, index_of(self.q, rows), index_of(self.k, storage.keys(self.k, b))

    def keys_and_values(self, b: int, keys: tuple[Tensor, ...]) -> list[Tensor]:
        """k and v of sequence b, (sk, heads, dim)."""
        scaled = ((self.k[keys], self.k_descale), (self.v[keys], self.v_descale))
        return [x if by is None else x * by[b].to(x.dtype)[:, None] for x, by in scaled]

    def attend(self, b: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of sequence b: q (sq, nheads, d), k (sk, nheads_kv, d), v (sk, nheads_kv, dv).

        Returns out (sq, nheads, dv), lse (nheads, sq) and the probabilities (nheads, sq, sk) before
        dropout.
        """
        (sq, nheads, _), sk = q.shape, len(k)
        k, v = k[:, self.kv_head], v[:, self.kv_head]

        scores = self.scale * torch.einsum("ihd,jhd->hij", q, k)
        if self.softcap > 0:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        # How far key j is right of query i's diagonal, which ends in the bottom right corner.
        rows, columns = (torch.arange(n, device=q.device) for n in (sq, sk))
        offset = columns - (rows[:, None] + sk - sq)
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes if self.alibi_slopes.dim() == 1 else self.alibi_slopes[b]
            scores = scores - slopes.to(q.dtype)[:, None, None] * offset.abs()
        left, right = self.window_size
        if self.causal:
            right = 0
        visible = torch.ones_like(offset, dtype=torch.bool)
        if right >= 0:
            visible &= offset <= right
        if left >= 0:
            visible &= offset >= -left
        if self.chunk > 0:
            visible &= columns // self.chunk == (columns - offset) // self.chunk
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.s_aux is not None:
            sinks = self.s_aux.to(q.dtype)[:, None, None].expand(nheads, sq, 1)
            scores = torch.cat([scores, sinks], dim=-1)
            visible = torch.cat([visible, visible.new_ones(sq, 1)], dim=-1)

        # Rows that see nothing have probability 0, log-sum-exp -inf and no gradient.
        sees = visible.any(1)
        p, lse = torch.zeros_like(scores), scores.new_full((nheads, sq), float("-inf"))
        p[:, sees], lse[:, sees] = scores[:, sees].softmax(-1), scores[:, sees].logsumexp(-1)
        p = p[..., :sk]
        kept = p if self.keep is None else p * self.keep[b, :, :sq, :sk] / (1 - self.dropout_p)
        return torch.einsum("hij,jhd->ihd", kept, v), lse, p

    def forward(self) -> tuple[Tensor, Tensor]:
        """out (like q), and lse (batch, nheads, seqlen_q) or (nheads, total_q).

        Rows outside every sequence are 0 in out and NaN, which means unspecified, in lse.
        """
        out = self.q.new_zeros(*self.q.shape[:-1], self.v.shape[-1])
        lse = self.q.new_full(self.q.shape[:-1], float("nan"))
        for b, rows, keys in self.sequences():
            k, v = self.keys_and_values(b, keys)
            out_rows, lse_rows, _ = self.attend(b, self.q[rows], k, v)
            out = out.index_put(rows, out_rows)
            lse = lse.index_put(rows, lse_rows.T)
        return out, lse.movedim(-1, -2)

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Attention:
        """The same problem with q, k and v in another dtype."""
        moved = {name: x.detach() for name, x in vars(self).items() if isinstance(x, Tensor)}
        moved = {name: x.to(device, dtype if name in "qkv" else None) for name, x in moved.items()}
        return replace(self, storage=self.storage.on_host(), **moved)

    @property
    def device(self) -> torch.device | str:
        """Where the oracle is computed."""
        if not self.q.is_cuda:
            return "cpu"
        scores = sum(len(rows[0]) * len(keys[0]) for _, rows, keys in self.sequences())
        return self.q.device if scores * self.q.shape[-2] > MANY_SCORES else "cpu"


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: list[int], interleaved: bool) -> Tensor:
    """Rotary embedding of x (len(positions), heads, dim); cos and sin are (seqlen, rotary_dim / 2).

    Component pairs (x[2i], x[2i + 1]) if interleaved, else (x[i], x[i + rotary_dim / 2]), are
    turned by the angle of their position.
    """
    half = cos.shape[1]
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    rotated = x.clone()
    real, imaginary = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    rotated[..., real] = x[..., real] * cos - x[..., imaginary] * sin
    rotated[..., imaginary] = x[..., real] * sin + x[..., imaginary] * cos
    return rotated


@dataclass
class Decode:
    """One call with a KV cache: append k_new and v_new at cache_seqlens, then attend to the cache.

    `attention` is the problem before the append: its k and v are the caches, its storage has no
    seqused. A row with cache_seqlens < 0 is padding: it appends nothing and sees nothing.
    """

    attention: Attention
    cache_seqlens: Tensor
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True

    def appended(self) -> list[list[Place]]:
        """Where the new keys of each sequence go."""
        new = 0 if self.k_new is None else self.k_new.shape[1]
        storage, k = self.attention.storage.on_host(), self.attention.k
        return [
            [storage.place(k, b, length + i) for i in range(new) if length >= 0]
            for b, length in enumerate(self.cache_seqlens.tolist())
        ]

    device = "cpu"

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Attention:
        """The attention problem after rotation and append, both computed in dtype."""
        problem = self.attention.to(dtype, device)
        q, k, v = (x.clone() for x in (problem.q, problem.k, problem.v))
        k_new, v_new = on_host(self.k_new, dtype), on_host(self.v_new, dtype)
        lengths, new = self.cache_seqlens.cpu(), 0 if k_new is None else k_new.shape[1]
        for b, places in enumerate(self.appended()):
            length = int(lengths[b])
            if self.rotary_cos is not None and length >= 0:
                q[b] = self.rotate(q[b], self.query_positions(length))
            for i, place in enumerate(places):
                k[place], v[place] = k_new[b, i], v_new[b, i]
                if self.rotary_cos is not None:
                    k[place] = self.rotate(k_new[b, i : i + 1], [length + i])[0]
        storage = replace(problem.storage, seqused=lengths + new * (lengths >= 0))
        return replace(problem, q=q, k=k, v=v, storage=storage)

    def rotate(self, x: Tensor, positions: list[int]) -> Tensor:
        cos, sin = on_host(self.rotary_cos, x.dtype), on_host(self.rotary_sin, x.dtype)
        return rotate(x, cos, sin, positions, self.rotary_interleaved)

    def query_positions(self, length: int) -> list[int]:
        """Successive queries are successive tokens if masked; unmasked, all are the next token."""
        a = self.attention
        masked = a.causal or a.window_size != (-1, -1) or a.chunk > 0
        return [length + i * masked for i in range(a.q.shape[1])]


# --------------------------------------------------------------------------------------------------
# The bound
# --------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """A tensor's true value, what naive arithmetic makes of it, and one ULP of its magnitude.

    Both are where the oracle is computed: see Attention.device.
    """

    exact: Tensor
    naive: Tensor
    ulp: float

    @property
    def tolerance(self) -> float:
        if self.naive.dtype == torch.float64:
            return 3 * self.ulp
        return 2 * largest(self.naive.double() - self.exact) + self.ulp


def results(
    problem: Attention, dout: Tensor | None = None, dlse: Tensor | None = None
) -> dict[str, Tensor]:
    """out and lse; with dout also dq, dk, dv, and ds_aux where there are sinks.

    The gradients are those of (out * dout).sum() + (lse * dlse).sum().
    """
    leaves = {"q": problem.q, "k": problem.k, "v": problem.v}
    if problem.s_aux is not None:
        leaves["s_aux"] = problem.s_aux.to(problem.q.dtype)
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    out, lse = replace(problem, **leaves).forward()
    values = {"out": out.detach(), "lse": lse.detach()}
    if dout is None:
        return values
    if not out.requires_grad:  # there is no sequence at all
        return values | {f"d{name}": torch.zeros_like(leaf) for name, leaf in leaves.items()}
    outputs, upstream = [out], [dout.to(out.dtype)]
    if dlse is not None:
        outputs, upstream = [out, lse], [dout.to(out.dtype), dlse.to(out.dtype)]
    grads = torch.autograd.grad(outputs, list(leaves.values()), upstream, materialize_grads=True)
    return values | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def magnitudes(
    problem: Attention,
    dtype: torch.dtype,
    scores_dtype: torch.dtype,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> dict[str, float]:
    """Magnitude of what is summed into each result, since rounding is relative to the summands.

    dS = P * (dP - delta) cancels: with one visible key it is 0 for every P and dP, and max |dq|
    would ask for exactness. S and lse, rounded to scores_dtype, make the relative rounding of
    P = exp(S - lse).
    """
    in_float32 = dtype.itemsize < 4  # then summands are rounded, independently, and sums are not
    norm = 2 if in_float32 else 1
    scores_eps = torch.finfo(scores_dtype).eps / torch.finfo(dtype).eps

    def dot(equation: str, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum(equation, x.abs() ** norm, y.abs() ** norm) ** (1 / norm)

    def dot_over_headdim(equation: str, x: Tensor, y: Tensor) -> Tensor:
        """Each of n partial sums rounds: sqrt(n) / 2 as much, though it depends on their order.

        Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019.
        """
        return dot(equation, x, y) * (1 if in_float32 else max(1, x.shape[-1] ** 0.5 / 2))

    def over_group(x: Tensor) -> Tensor:
        heads = (x.shape[1] // max(problem.group, 1), problem.group)
        return (x**norm).unflatten(1, heads).sum(2) ** (1 / norm)

    largest_of: dict[str, float] = {}
    for b, rows, keys in problem.sequences():
        q = problem.q[rows]
        k, v = problem.keys_and_values(b, keys)
        out, lse, p = problem.attend(b, q, k, v)
        k, v = (x[:, problem.kv_head] for x in (k, v))
        scores = problem.scale * dot_over_headdim("ihd,jhd->hij", q, k)
        # 1: the logarithm makes an absolute error of the sum's relative one.
        logarithm = 1 + lse.abs().nan_to_num(posinf=0.0)[..., None]
        p_rounding = scores_eps * p * (scores + logarithm)
        kept = (p + p_rounding) / (1 - problem.dropout_p)
        summed = {"out": dot("hij,jhd->ihd", kept, v), "lse": scores + logarithm}
        if dout is not None:
            do = dout[rows].to(q.dtype)
            delta = dot_over_headdim("ihd,ihd->hi", do, out)
            if dlse is not None:
                delta = delta + dlse.movedim(-2, -1)[rows].T.abs()
            dp = dot_over_headdim("ihd,jhd->hij", do, v) / (1 - problem.dropout_p)
            dp_itself = torch.einsum("ihd,jhd->hij", do, v).abs() / (1 - problem.dropout_p)
            ds = p * (dp + delta[..., None]) + p_rounding * dp_itself
            summed["dq"] = problem.scale * dot("hij,jhd->ihd", ds, k)
            summed["dk"] = problem.scale * over_group(dot("hij,ihd->jhd", ds, q))
            summed["dv"] = over_group(dot("hij,ihd->jhd", kept, do))
            if problem.s_aux is not None:
                p_sink = (problem.s_aux.to(q.dtype)[:, None] - lse).exp()
                p_sink = p_sink * (1 + scores_eps * logarithm[..., 0])
                summed["ds_aux"] = dot("hi,hi->h", p_sink, delta)
        for name, value in summed.items():
            largest_of[name] = max(largest_of.get(name, 0.0), largest(value))
    return largest_of


def largest(x: Tensor) -> float:
    """The largest finite magnitude in x."""
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def expect(
    problem: Attention | Decode, dout: Tensor | None = None, dlse: Tensor | None = None
) -> dict[str, Expected]:
    """What out, lse and, with dout, the gradients have to be."""
    given = problem if isinstance(problem, Attention) else problem.attention
    dtype = given.q.dtype
    scores_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if isinstance(problem, Decode) and problem.rotary_cos is not None:
        scores_dtype = dtype  # rotated queries and keys are rounded, and stored, in dtype
    device = problem.device
    dout, dlse = (None if x is None else x.detach().to(device) for x in (dout, dlse))
    problem64 = problem.to(torch.float64, device)
    exact = results(problem64, dout, dlse)
    with sums_in_float32():
        naive = results(problem.to(dtype, device), dout, dlse)
    summed = magnitudes(problem64, dtype, scores_dtype, dout, dlse)
    eps = dict.fromkeys(exact, torch.finfo(dtype).eps) | {"lse": torch.finfo(scores_dtype).eps}
    if given.s_aux is not None:
        eps["ds_aux"] = max(torch.finfo(dtype).eps, torch.finfo(given.s_aux.dtype).eps)
    expected = {
        name: Expected(value, naive[name], eps[name] * max(largest(value), summed.get(name, 0.0)))
        for name, value in exact.items()
    }
    del problem64, exact, naive, dout, dlse
    if device != "cpu":
        torch.cuda.empty_cache()  # other processes test on the same GPU
    return expected


@contextmanager
def sums_in_float32() -> Iterator[None]:
    """cuBLAS adds up products of 16 bits in float32, as the CPU does."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


def cosine(x: Tensor, y: Tensor) -> float:
    """Cosine similarity of two tensors read as vectors; 0 where just one of them is zero."""
    x, y = x.flatten() / largest(x), y.flatten() / largest(y)
    return (x @ y / (x.norm() * y.norm())).nan_to_num(0.0).item()


def assert_close_to_oracle(actual: Tensor, expected: Expected, name: str) -> None:
    """Fail unless `actual` is as close to the oracle as its dtype allows.

    The largest error is at most 2 x that of naive arithmetic in the input's dtype + one unit in the
    last place of the magnitude, and the cosine similarity at least 0.999 (unless it can't be: the
    angle may be twice that of naive arithmetic, and what rounding within one ULP makes it). NaN in
    the oracle marks what is unspecified; everything else has to be finite where the oracle is.
    """
    shapes = tuple(actual.shape), tuple(expected.exact.shape)
    assert shapes[0] == shapes[1], f"{name}: shape {shapes[0]}, the oracle's is {shapes[1]}"
    specified = ~expected.exact.isnan()
    got, exact, naive = (
        x.detach().to(expected.exact.device)[specified].double()
        for x in (actual, expected.exact, expected.naive)
    )
    finite = exact.isfinite()
    assert torch.equal(got[~finite], exact[~finite]), f"{name}: not -inf where the oracle is"
    got, exact, naive = got[finite], exact[finite], naive[finite]
    assert got.isfinite().all(), f"{name}: {int((~got.isfinite()).sum())} values are not finite"

    error = largest(got - exact)
    assert error <= expected.tolerance, (
        f"{name}: error {error:.3g} > {expected.tolerance:.3g}, of which one ULP {expected.ulp:.3g}"
    )

    if largest(exact) == 0:
        return  # no direction
    # 1 - cosine is half the square of the angle. Errors spread evenly within one ULP have a mean
    # square of ULP^2 / 12, and make the square of the angle as large as that beside the signal's.
    rounding = (expected.ulp**2 / 24 / exact.square().mean()).item()
    required = min(0.999, 1 - 4 * (1 - cosine(naive, exact)), 1 - rounding)
    similarity = cosine(got, exact)
    assert similarity >= required, f"{name}: cosine similarity {similarity:.6f} < {required:.6f}"


def assert_matches_oracle(
    actual: dict[str, Tensor],
    problem: Attention | Decode,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> None:
    """Compare each result in `actual` (out, lse, dq, dk, dv, ds_aux) with the oracle's."""
    expected = expect(problem, dout, dlse)
    for name, value in actual.items():
        assert_close_to_oracle(value, expected[name], name)
