"""Exact attention for PyTorch: CUDA kernels where they can run, tiled PyTorch everywhere."""

from pkgutil import extend_path

# Another distribution may install flash_attn.cute beside this package.
__path__ = extend_path(__path__, __name__)

from flash_attn._backends import available_backends, use_backend
from flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn.version import __version__

__all__ = [
    "__version__",
    "available_backends",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "use_backend",
]
