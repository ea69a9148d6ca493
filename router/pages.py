"""What is served at one address: handlers by path.

Not aiohttp's application: with a few pages and one prefix to choose from, its routing and its hooks took 7 %
of what a request cost (docs/studies.md).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from aiohttp import web

from router.headers import EXPECT

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
READING = ("GET", "HEAD")
_SEPARATORS = re.compile(r"/|\\|%2[fF]")


class Pages:
    """``limit_bytes`` is the most that a request's body may have."""

    def __init__(self, limit_bytes: int = 1024 * 1024) -> None:
        self.limit_bytes = limit_bytes
        self._pages: dict[str, Handler] = {}
        self._below: list[tuple[str, Handler]] = []
        self._rest: Handler | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """Those of the pages that were added one by one."""
        return tuple(self._pages)

    def add(self, path: str, handler: Handler) -> None:
        """Answers GET and HEAD of ``path``."""
        self._pages[path] = handler

    def add_all_below(self, prefix: str, handler: Handler) -> None:
        """Answers all else whose path begins with ``prefix``."""
        self._below.append((prefix, handler))

    def add_rest(self, handler: Handler) -> None:
        """Answers what nobody else serves."""
        self._rest = handler

    def wrap(self, wrapped: Callable[[Handler], Handler]) -> None:
        """Has each handler that is there replaced by what ``wrapped`` makes of it."""
        self._pages = {path: wrapped(handler) for path, handler in self._pages.items()}
        self._below = [(prefix, wrapped(handler)) for prefix, handler in self._below]

    def answer(self, request: web.Request) -> Awaitable[web.StreamResponse]:
        """The answer to any request. Raises web.HTTPNotFound, web.HTTPMethodNotAllowed for what nobody
        serves, and web.HTTPExpectationFailed for what nobody can meet.
        """
        handler = self._handler(request.rel_url.path_safe, request.method)
        if EXPECT in request.headers and request.headers[EXPECT].lower() != "100-continue":
            raise web.HTTPExpectationFailed
        return handler(request)

    def _handler(self, path: str, method: str) -> Handler:
        page = self._pages.get(path)
        if page is not None and method in READING:
            return page
        for prefix, handler in self._below:
            if path.startswith(prefix) and not (".." in path and _leads_out(path[len(prefix) :])):
                return handler
        if page is None and self._rest is not None:
            return self._rest
        if page is None:
            raise web.HTTPNotFound
        raise web.HTTPMethodNotAllowed(method, READING)


def _leads_out(below: str) -> bool:
    """Whether what stands below a prefix leads above it. It is passed on as it came, and the engine's web
    server, or a proxy in front of it, may resolve ``..``, in any of these spellings, and serve what is there.
    """
    depth = 0
    for segment in _SEPARATORS.split(below):
        name = segment.partition(";")[0]
        if name == "..":
            depth -= 1
        elif name not in ("", "."):
            depth += 1
        if depth < 0:
            return True
    return False
