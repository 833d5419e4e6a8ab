"""Rules: conditions on quantities, and the alerts that they raise."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    name="rules",
    parts=("gpumond.features.rules.registry:RulesPart",),
    routes=("gpumond.features.rules.routes:router",),
    commands=(
        Command(
            name="rules",
            module="gpumond.features.rules.command",
            help="list, check, test and override rules, and test alert receivers",
            group="Daemon",
            examples=(
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
