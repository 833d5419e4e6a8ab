"""Documents whose elements are nested correctly."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = ("meta",)


class Document(HTMLParser):
    """Elements, attributes and text of a document, whose elements must be nested correctly."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.texts: list[str] = []
        self.feed(document)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def checked(document: str) -> Document:
    found = Document(document)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert not {"src", "href", "onclick", "onload"} & found.attributes.keys()
    assert "url(" not in document
    assert "\x1b" not in document
    assert "default-src 'none'; style-src 'unsafe-inline'" in found.attributes["content"]
    return found
