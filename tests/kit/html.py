"""What is on a page in HTML."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._pieces: list[str] = []
        self._is_silent = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._is_silent = self._is_silent and tag not in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._is_silent:
            self._pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self._pieces).split())

    @property
    def pieces(self) -> list[str]:
        """The text of each element."""
        return [" ".join(piece.split()) for piece in self._pieces if piece.strip()]

    def outside(self) -> list[tuple[str, str, str]]:
        """Whatever the page reaches for beyond itself."""
        names = ("src", "href", "action", "data", "srcset", "poster", "formaction")
        values = ((tag, name, attributes.get(name) or "") for tag, attributes in self.tags for name in names)
        return [one for one in values if one[2] and not one[2].startswith(("#", "data:"))]
