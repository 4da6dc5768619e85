"""One timing harness, one script per question; run as ``python -m benchmarks.<name>``."""
