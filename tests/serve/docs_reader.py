"""Reader of the pages of the documentation."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = ("meta", "link", "tr", "th", "td")
"""Elements without an end tag; those of tables end with the next one."""


class Reader(HTMLParser):
    """Elements, addresses and text of a page; checks that elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, attribute: str) -> set[str]:
        return {attributes[attribute] or "" for _, attributes in self.elements if attribute in attributes}
