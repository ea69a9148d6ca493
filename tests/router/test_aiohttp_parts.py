"""What of aiohttp is not promised to anybody: a version that has it no more is named at the start."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from aiohttp import http_parser, http_writer, web, web_protocol
from aiohttp.http_writer import StreamWriter

from router import aiohttp_parts
from router.aiohttp_parts import NAMES, check_aiohttp
from router.assembly import router_app
from router.errors import SettingsError
from router.settings import RouterSettings

ROUTER = Path(aiohttp_parts.__file__).parent
USERS = (
    "server.py",
    "incoming.py",
    "last_words.py",
    "delivery.py",
    "header_bytes.py",
    "pool.py",
    "head.py",
    "upstream.py",
    "body.py",
)


def test_the_installed_aiohttp_has_all_of_them() -> None:
    check_aiohttp()


@pytest.mark.parametrize("name", USERS)
def test_every_private_name_of_aiohttps_that_is_used_is_looked_for(name: str) -> None:
    tree = ast.parse((ROUTER / name).read_text())
    nodes = list(ast.walk(tree))
    own = {
        node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    own |= {
        node.target.attr
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute)
    }
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            targets = [
                target for each in ast.walk(node) if isinstance(each, ast.Assign) for target in each.targets
            ]
            flat = [one for each in targets for one in (each.elts if isinstance(each, ast.Tuple) else [each])]
            own |= {each.attr for each in flat if isinstance(each, ast.Attribute)}
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    foreign = {name for name in used - own if not name.startswith("__")}
    assert foreign <= NAMES


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (web.RequestHandler, "_handle_request"),
        (web.RequestHandler, "_messages"),
        (StreamWriter, "_write"),
        (http_writer, "_serialize_headers"),
        (web_protocol, "_ErrInfo"),
    ],
)
async def test_a_router_over_another_aiohttp_says_so_at_the_start(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(SettingsError, match=rf"aiohttp 3\.\S+ .*{name}.*; install aiohttp>=3\.14"):
        async with router_app(RouterSettings(listen="127.0.0.1:0")):
            pass


async def test_a_step_that_takes_something_else_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def other(self: Any, request: Any, resp: Any) -> None: ...

    monkeypatch.setattr(web.RequestHandler, "finish_response", other)
    with pytest.raises(SettingsError, match=r"finish_response|other\(request, resp, start_time\)"):
        check_aiohttp()


@pytest.mark.parametrize("name", ["HttpRequestParser", "HttpResponseParser"])
def test_a_parser_that_does_not_take_heads_alone_is_another_one(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(http_parser, name, getattr(http_parser, f"{name}Py"))
    with pytest.raises(SettingsError, match=rf"it lacks {name}\S* in C, for heads alone;"):
        check_aiohttp()
