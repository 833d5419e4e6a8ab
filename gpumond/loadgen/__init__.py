"""Generator of known patterns of GPU memory use: plans from scenarios, and engines that execute them."""

from gpumond.loadgen.plan import SCENARIOS, Plan, plan
from gpumond.loadgen.script import Truth

__all__ = ["SCENARIOS", "Plan", "Truth", "plan"]
