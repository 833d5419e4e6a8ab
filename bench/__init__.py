"""One script per claim: ``python -m bench.NAME`` prints its result, ``--save`` keeps it below results/."""
