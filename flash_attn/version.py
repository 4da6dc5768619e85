"""Version of the API that clients see, and of the kernels behind it."""

# The upstream API level followed here; also the distribution version, because clients compare it.
__version__ = "2.8.3"

# This library's own version.
KERNELS_VERSION = "0.1.0"
