"""Example models and commands: what the benchmarks, the tests and the README build on."""
