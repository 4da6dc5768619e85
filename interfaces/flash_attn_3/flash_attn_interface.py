"""The module ``flash_attn_interface`` under its name inside of the package."""

from flash_attn_interface import *  # noqa: F403
from flash_attn_interface import __all__ as __all__
