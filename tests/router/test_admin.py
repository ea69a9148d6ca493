"""What operators are told by the router's own pages."""

from __future__ import annotations

from typing import Any


async def test_op10_a_page_that_is_not_there_names_those_that_are_in_the_shape_of_all_errors(
    start_router: Any,
) -> None:
    router = await start_router(admin_listen=None)
    admin = router.parts.admin_url
    async with router.client.get(f"{admin}/debug", headers={"X-Request-Id": "abc"}) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (404, "abc")
        error = (await response.json())["error"]
    assert {name: error[name] for name in ("type", "param", "code")} == {
        "type": "Not Found",
        "param": None,
        "code": 404,
    }
    begin, _, pages = error["message"].partition(" are ")
    assert begin == "Not Found: the pages here"
    for path in pages.split(", "):
        async with router.client.get(admin + path) as response:
            assert response.status == (503 if path == "/ready" else 200), path
    assert {"/metrics", "/debug/rules", "/debug/tokenizers"} < set(pages.split(", "))
    async with router.client.post(admin + "/metrics") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET,HEAD")
    async with router.client.get(f"{router.url}/debug") as response:
        assert "on --admin-listen" in (await response.json())["error"]["message"]
