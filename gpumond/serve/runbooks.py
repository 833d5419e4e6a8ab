"""GET /docs/runbooks/: the runbooks of all alerts, to which alerts and dashboards link.

Links to other documents are text here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from fastapi import APIRouter
from fastapi.responses import Response

from gpumond.page.files import HEADERS
from gpumond.page.runbooks import INTRODUCTION, SECTIONS
from gpumond.serve.docs import HEAD, words
from gpumond.serve.problems import problem

ROOT = "../../"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]*)\)")

router = APIRouter(include_in_schema=False)


@router.get("/docs/runbooks/")
async def index() -> Response:
    items = (f'<li><a href="{escape(name)}">{escape(name)}</a></li>' for name in SECTIONS)
    return page("Runbooks", *paragraphs(INTRODUCTION), "<ul>", *items, "</ul>")


@router.get("/docs/runbooks/{name}")
async def runbook(name: str) -> Response:
    text = SECTIONS.get(name.lower())
    if text is None:
        return problem(404, f"there is no runbook {name[:80]!r}; /docs/runbooks/ lists them")
    return page(f"Runbook: {name.lower()}", *paragraphs(text), '<p><a href="./">All runbooks</a></p>')


def page(title: str, *parts: str) -> Response:
    text = "\n".join((HEAD.format(title=escape(title), root=ROOT), "<main>", *parts, "</main>\n</body>\n</html>\n"))
    return Response(text, media_type="text/html; charset=utf-8", headers=HEADERS)


def paragraphs(text: str) -> Iterator[str]:
    """Convert paragraphs with code, bold words and links to sections of the document."""
    for part in text.split("\n\n"):
        if part.strip():
            bold = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", words(part.strip()))
            yield f"<p>{LINK.sub(_link, bold)}</p>"


def _link(found: re.Match[str]) -> str:
    text, target = found.groups()
    return f'<a href="{target[1:]}">{text}</a>' if target.startswith("#") else text
