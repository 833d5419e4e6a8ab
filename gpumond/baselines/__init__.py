"""Baselines: record the memory use of workloads, and compare two records."""
