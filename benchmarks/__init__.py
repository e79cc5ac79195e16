"""Benchmarks and checks that need more than a test: `python -m benchmarks.gpu_check`."""
