"""Makes pages: templates that escape whatever they are given, the headers that go with them, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from jinja2 import DictLoader, Environment, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from worker import serve

# What a page may load and do: its own files and nothing else; no script but a file's, so none that somebody's text is.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Not no-referrer: with that a browser says of a page's own forms that they come from nowhere (Origin: null).
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_FILES = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
_FILE_AGE_S = 3600  # for which a browser takes them from its cache


class Pages:
    """The pages' templates (templates/*.html), read once."""

    def __init__(self) -> None:
        found = resources.files(serve).joinpath("templates")
        sources = {entry.name: entry.read_text() for entry in found.iterdir() if entry.name.endswith(".html")}
        self._templates = Environment(
            loader=DictLoader(sources), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )

    def text(self, name: str, values: Mapping[str, object]) -> str:
        """A template with these values in it."""
        return self._templates.get_template(name).render(values)

    def response(self, name: str, values: Mapping[str, object], status: int = 200) -> Response:
        """A page."""
        return HTMLResponse(self.text(name, values), status, HEADERS)


def file_routes() -> list[Route]:
    """The routes of the style, the script and the icon, which are nobody's secret."""

    def route(name: str, media_type: str) -> Route:
        content = resources.files(serve).joinpath("static", name).read_bytes()
        headers = {"Cache-Control": f"max-age={_FILE_AGE_S}", "X-Content-Type-Options": "nosniff"}

        async def file(_request: Request) -> Response:
            return Response(content, headers=headers, media_type=media_type)

        return Route(f"/{name}", file)

    return [route(name, media_type) for name, media_type in _FILES.items()]
