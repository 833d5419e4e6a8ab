"""Makes every shape of GPU memory use on purpose: plans from scenarios, and engines that carry them out."""

from gpumond.loadgen.plan import SCENARIOS, Plan, plan
from gpumond.loadgen.script import Truth

__all__ = ["SCENARIOS", "Plan", "Truth", "plan"]
