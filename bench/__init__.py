"""Benchmarks, one script for each claim: ``python -m bench.NAME`` prints its result, ``--save`` stores it."""
