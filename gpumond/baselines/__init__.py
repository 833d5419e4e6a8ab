"""Baselines: record how workloads hold memory, and compare two records."""
