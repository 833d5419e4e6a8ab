"""The security guarantees of ``guarantees.yaml``, each with mutations of the code and the tests that notice them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    """In the file ``path``, ``old`` becomes ``new``; ``test`` notices it."""

    guarantee: str
    path: str
    old: str
    new: str
    test: str

    def applied(self, text: str) -> str:
        assert text.count(self.old) == 1, f"{self.path} contains {self.old!r} {text.count(self.old)} times, not once"
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.path.removeprefix('gpumond/')} {self.old[:40]}"


def _read() -> tuple[Mutation, ...]:
    table = yaml.safe_load((ROOT / "tests/guarantees.yaml").read_text())
    return tuple(
        Mutation(guarantee, each["in"], each["replace"], each["by"], each["noticed"])
        for guarantee, mutations in table.items()
        for each in mutations
    )


MUTATIONS = _read()
