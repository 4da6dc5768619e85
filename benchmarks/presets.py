"""Cases that are compared again and again, by name."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple


def combinations(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of the fields' values; the last varies fastest."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


class Preset(NamedTuple):
    """Cases, by their fields but direction and dtype, and how they are compared."""

    cases: list[dict[str, Any]]
    providers: tuple[str, ...] = ("sm90", "fa3", "cudnn")
    baseline: str = "fa3"
    peers: tuple[str, ...] = ()  # among whom the best peer is sought; (): all others
    others: dict[str, Any] = {}  # defaults of other options


def sized(
    nheads: int, nheads_kv: int, headdim: int, seqlen: int, batch: int = 1, **more: Any
) -> dict[str, Any]:
    """Fields of ``batch`` sequences; causal, unless ``more`` says otherwise."""
    sizes = {"tokens": batch * seqlen, "width": nheads * headdim, "group": nheads // nheads_kv}
    return {"headdim": headdim, "causal": True, "seqlen": seqlen, **sizes, **more}


def decoding(
    batch: int, seqlen: int, nheads: int = 32, nheads_kv: int = 8, headdim: int = 128, **more: Any
) -> dict[str, Any]:
    """A step of decoding: queries at the end of ``batch`` KV caches."""
    return sized(nheads, nheads_kv, headdim, seqlen, batch, **{"queries": 1, **more})


def of_model(model: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """An attention of a model: its name, then what ``sized`` takes."""
    return sized(*sizes, model=model, **more)


def chunk(
    nheads: int, headdim: int, queries: int, keys: int, headdim_v: int = 0, **more: Any
) -> dict[str, Any]:
    """Some queries at the end of one KV cache, which they make longer; heads in groups of 4."""
    return decoding(
        1, keys, nheads, nheads // 4, headdim, queries=queries, headdim_v=headdim_v, **more
    )


NO_MASK = {"causal": False}
MODELS = [
    # Prefills of language models.
    *(of_model("Llama-3-8B", 32, 8, 128, seqlen) for seqlen in (512, 1024, 2048, 4096, 8192)),
    of_model("Llama-3-70B", 64, 8, 128, 2048),
    of_model("Qwen2.5-0.5B", 14, 2, 64, 2048),
    of_model("Gemma-2-9B", 16, 8, 256, 4096),
    of_model("Gemma-2-9B", 16, 8, 256, 8192, window=4096),
    of_model("Gemma-7B", 16, 16, 256, 1024),
    of_model("Mistral-7B", 32, 8, 128, 8192, window=4096),
    of_model("DeepSeek-V3", 128, 128, 192, 2048, headdim_v=128),
    of_model("Falcon-7B", 71, 1, 64, 2048),
    of_model("StarCoder", 48, 1, 128, 2048),
    of_model("Phi-2", 32, 32, 80, 2048),
    of_model("Phi-3-mini", 32, 32, 96, 4096),
    # Their training.
    of_model("GPT-2 small", 12, 12, 64, 1024, 16),
    of_model("GPT 1.3B", 16, 16, 128, 2048, 8),
    of_model("Llama-3.2-1B", 32, 8, 64, 4096, 2),
    # Encoders of text, of images, of speech.
    of_model("BERT-base", 12, 12, 64, 512, 32, **NO_MASK),
    of_model("BERT-large", 16, 16, 64, 512, 16, **NO_MASK),
    of_model("ViT-L/14", 16, 16, 64, 257, 32, **NO_MASK),
    of_model("SigLIP-so400m", 16, 16, 72, 729, 8, **NO_MASK),
    of_model("ViT-H", 16, 16, 80, 1024, 8, **NO_MASK),
    of_model("Whisper encoder", 20, 20, 64, 1500, **NO_MASK),
    of_model("Whisper cross", 20, 20, 64, 448, keys=1500, **NO_MASK),
    # Diffusion of images and of video.
    of_model("SDXL", 10, 10, 64, 4096, 2, **NO_MASK),
    of_model("SDXL", 20, 20, 64, 1024, 2, **NO_MASK),
    of_model("SDXL cross", 10, 10, 64, 4096, keys=77, **NO_MASK),
    of_model("SDXL cross", 20, 20, 64, 1024, 2, keys=77, **NO_MASK),
    of_model("SD 1.5", 8, 8, 40, 4096, 2, **NO_MASK),
    of_model("Flux", 24, 24, 128, 4608, **NO_MASK),
    of_model("video", 24, 24, 128, 32768, **NO_MASK),
]
MASKS = (False, True)
PRESETS = {
    "lengths": Preset(
        combinations(
            headdim=(64, 96, 128, 192, 256), causal=MASKS, seqlen=[2**n for n in range(10, 15)]
        )
    ),
    "short": Preset(
        combinations(headdim=(64, 128, 256), causal=MASKS, seqlen=(128, 256, 512)),
        others={"timing": "graph"},
    ),
    "window": Preset(
        combinations(window=(256, 1024, 4096), headdim=(64, 128), causal=[True], seqlen=[16384])
    ),
    "varlen": Preset(
        [
            {**lengths, **fields}
            for lengths in ({"shortest": 64, "seqlen": 4096}, {"shortest": 1, "seqlen": 512})
            for fields in combinations(
                varlen=[True], headdim=(64, 128, 256), causal=MASKS, tokens=[65536]
            )
        ]
    ),
    # As documents are: one of 16k tokens among 18 shorter ones, or of 2k among 127.
    "documents": Preset(
        [
            {"varlen": True, "log_uniform": True, "shortest": 16, "tokens": 65536, **fields}
            for fields in combinations(seqlen=(16384, 2048), headdim=(64, 128, 256), causal=[True])
        ]
    ),
    "gqa": Preset(
        [
            {"group": nheads // 8, "width": nheads * fields["headdim"], **fields}
            for nheads in (32, 64)
            for fields in combinations(headdim=(64, 128), causal=MASKS, seqlen=(1024, 4096, 16384))
        ]
    ),
    # No peer has these with instructions of Hopper.
    "options": Preset(
        [
            {**option, **fields}
            for option in ({"alibi": True}, {"dropout_p": 0.1}, {"softcap": 30.0})
            for fields in combinations(
                headdim=(64, 128, 256), causal=MASKS, seqlen=(1024, 4096, 16384)
            )
        ],
        providers=("sm90", "sm80"),
        baseline="sm80",
    ),
    # Fewer tiles than SMs: prompts in chunks, on GPUs that share a model's heads.
    "few-tiles": Preset(
        [
            *(
                chunk(nheads, 128, queries, 1024 * n)
                for nheads in (4, 8, 32)
                for queries in (64, 256, 512)
                for n in (2, 8, 32)
            ),
            *(
                chunk(nheads, headdim, queries, 1024 * n)
                for headdim in (64, 256)
                for nheads in (4, 16)
                for queries in (64, 512)
                for n in (2, 16)
            ),
            *(
                chunk(8, headdim, queries, 8192, headdim_v)
                for headdim, headdim_v in ((32, 0), (96, 0), (192, 0), (192, 128))
                for queries in (64, 512)
            ),
        ],
        providers=("sm90", "sm80", "fa3", "flash", "cudnn"),
        others={"timing": "graph", "direction": ["forward"]},
    ),
    # One or two waves of tiles, of which the last is seldom full.
    "few-waves": Preset(
        [
            chunk(nheads, headdim, queries, keys, causal=causal)
            for headdim in (64, 128, 256)
            for causal, nheads, queries, keys in (
                (True, 72, 128, 32768),
                (True, 28, 640, 10000),
                (True, 40, 512, 16384),
                (True, 40, 512, 65536),
                (True, 20, 1024, 32768),
                (True, 16, 1500, 6000),
                (True, 24, 1024, 8192),
                (True, 12, 2048, 16384),
                (False, 20, 1024, 4096),
                (False, 12, 1900, 9000),
                (False, 16, 1536, 3072),
                (False, 12, 2400, 6000),
                (False, 8, 2600, 15000),
                (False, 40, 512, 16384),
            )
        ],
        providers=("sm90", "sm80", "fa3", "flash", "cudnn"),
        others={"timing": "graph", "direction": ["forward"]},
    ),
    "decode": Preset(
        [
            *(decoding(1, 1024 * n) for n in (1, 8, 32, 128)),
            *(decoding(16, 1024 * n) for n in (1, 8, 32)),
            *(decoding(64, 1024 * n) for n in (1, 8)),
            *(decoding(batch, 8192, queries=4) for batch in (1, 16)),
            decoding(16, 8192, nheads_kv=32),
            decoding(64, 8192, nheads=128, nheads_kv=1),
            decoding(16, 8192, headdim=64),
            *(decoding(16, 8192, page_size=n) for n in (16, 64, 256)),
            decoding(32, 8192, page_size=16, varlen=True),  # more sequences, as most are shorter
        ],
        providers=("sm90", "sm80", "fa3", "flashinfer", "flash", "cudnn"),
        others={"timing": "graph", "flush_l2": True, "direction": ["forward"]},
    ),
    "models": Preset(
        MODELS,
        providers=("sm90", "sm80", "fa3", "cudnn", "flash"),
        peers=("fa3", "cudnn"),
        others={"timing": "graph"},
    ),
}


HEADDIMS = (64, 72, 80, 96, 112, 128, 160, 192, 256)  # of random cases
BLOCK = 128  # queries, about as many as a thread block has


def random_cases(count: int, seed: int) -> list[dict[str, Any]]:
    """Small problems of all kinds; the seed decides them."""
    draw = random.Random(seed)
    return [random_case(draw, f"#{i}") for i in range(count)]


def random_case(draw: random.Random, label: str) -> dict[str, Any]:
    """Work for about 1 to 400 thread blocks, as often for 1 to 20 as for 20 to 400."""
    headdim = draw.choices(HEADDIMS, [5 if headdim in (64, 128) else 1 for headdim in HEADDIMS])[0]
    work = log_uniform(draw, 1, 400)
    blocks = math.inf  # of one head
    while blocks > work:
        seqlen = round(log_uniform(draw, 64, 4096))
        seqlen = draw.choice((seqlen, -(-seqlen // 64) * 64))
        blocks = math.ceil(seqlen / BLOCK)
    batch = round(log_uniform(draw, 1, math.sqrt(work / blocks)))  # mostly fewer than heads
    nheads = round(work / blocks / batch)
    group = draw.choice([group for group in (1, 2, 4, 8, nheads) if group <= nheads])
    nheads_kv = nheads // group
    kind = draw.choices(("self", "cross", "packed"), (7, 2, 1))[0]
    return sized(
        nheads_kv * group,
        nheads_kv,
        headdim,
        seqlen,
        batch,
        causal=draw.choice((False, True)),
        headdim_v=draw.choice((0, 128)) if headdim == 192 else 0,
        keys=round(log_uniform(draw, 16, 8192)) if kind == "cross" else 0,
        varlen=kind == "packed",
        model=label,
    )


def log_uniform(draw: random.Random, least: float, most: float) -> float:
    return math.exp(draw.uniform(math.log(least), math.log(most)))
