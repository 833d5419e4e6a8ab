"""Rules: thresholds for quantities, and the alerts that they raise."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    parts=("registry:RulesPart",),
    routes=("routes:router",),
    commands=(
        Command(
            "rules",
            "Daemon",
            "list, check, test and override rules, and test alert receivers",
            (
                "gpumond rules check rules.yaml",
                "gpumond rules test rules.test.yaml",
                "gpumond rules list",
                "gpumond rules override device-nearly-full --threshold 90%",
                "gpumond rules restore device-nearly-full",
                "gpumond rules test-receiver slack",
            ),
        ),
    ),
)
