"""A model hub that cannot be reached: connections are taken and nothing is ever answered."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("tokenizers", reason="the extra local-tokenizer is not installed")

from tests.router import small_tokenizer
from tests.router.command import started

ROOT = Path(__file__).parents[2]


async def test_px13_a_hub_that_does_not_answer_holds_up_neither_requests_nor_the_end(
    start_engine: Any,
) -> None:
    engine = await start_engine()
    with socket.create_server(("127.0.0.1", 0)) as hub:
        url = f"http://127.0.0.1:{hub.getsockname()[1]}"
        process, router = await started(
            *("router", "--listen", "127.0.0.1:0", "--admin-listen", "same"),
            *("--replica", f"e0={engine.url}", "--tokenizer", "m=some/model"),
            HF_ENDPOINT=url,
            HF_HUB_OFFLINE="0",
            NO_PROXY="127.0.0.1",
        )
        try:
            async with asyncio.timeout(60), aiohttp.ClientSession() as client:
                hub.setblocking(False)
                connection, _ = await asyncio.get_running_loop().sock_accept(hub)  # it hangs in the load now
                for _ in range(5):
                    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
                    async with client.post(f"{router}/v1/chat/completions", json=body) as response:
                        assert response.status == 200
                    async with client.get(f"{router}/health") as response:
                        assert response.status == 200
                async with client.get(f"{router}/debug/tokenizers") as response:
                    told = json.loads(await response.read())["tokenizers"]
                assert [one["state"] for one in told] == ["loading"]
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
                connection.close()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def test_a_model_that_was_fetched_before_is_read_without_the_hub(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--some--model"
    small_tokenizer.save(model / "snapshots" / ("a" * 40))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    program = (
        "import sys; from router.local_tokenizer import load_tokenizer;"
        "from router.token_cache import TokenCache;"
        "local = load_tokenizer('some/model', 'm', TokenCache(1000));"
        "assert local.is_plain and list(local.encode('<s></s>', False)) == [0, 1];"
        "assert 'transformers' not in sys.modules"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env=environment)
