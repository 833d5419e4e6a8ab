"""Generates gpumond/page/meanings.js from the definitions in gpumond/facts/shares.py: ``make docs``."""

from __future__ import annotations

import json

from gpumond.facts.shares import SHARE_MEANINGS

HEADER = "// What each share of a device's memory is. Generated from gpumond/facts/shares.py by `make docs`."


def document() -> str:
    lines = [HEADER, "", "export const MEANINGS = {"]
    lines += [f"  {share}: {_text(text)}," for share, text in SHARE_MEANINGS.items()]
    lines.append("};")
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


if __name__ == "__main__":
    print(document(), end="")  # noqa: T201
