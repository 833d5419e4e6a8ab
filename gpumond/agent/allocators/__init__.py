"""Adapters for the allocators of the program that the agent runs in."""
