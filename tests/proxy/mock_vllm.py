"""A MOCK of `vllm serve MODEL --port N`: lists one model and answers chat completions with exact ids, no model.

It takes the options that the documentation uses and ignores what they would mean to vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from aiohttp import web
from proxy_stub import completion

WINDOW = 4096


def app(model: str, key: str | None = None, **card: Any) -> web.Application:
    """The server's paths; those that nobody may reach through the proxy answer too."""
    made = web.Application()

    async def models(request: web.Request) -> web.Response:
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        shown = {"id": model, "object": "model", "owned_by": "vllm", "root": model, "max_model_len": WINDOW} | card
        return web.json_response({"object": "list", "data": [shown]})

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] != model:
            return web.json_response({"error": {"message": f"The model `{body['model']}` does not exist."}}, status=404)
        texts = [m["content"] if isinstance(m.get("content"), str) else "" for m in body["messages"]]
        plain = [{"role": m["role"], "content": t} for m, t in zip(body["messages"], texts, strict=True)]
        return web.json_response(completion(body | {"messages": plain}, f"echo {texts[-1]}"))

    made.router.add_get("/v1/models", models)
    made.router.add_post("/v1/chat/completions", chat)
    return made


async def serve(model: str, port: int) -> None:
    runner = web.AppRunner(app(model, os.environ.get("VLLM_API_KEY")))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print("Application startup complete.", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name")
    args, _ = parser.parse_known_args()
    asyncio.run(serve(args.served_model_name or args.model, args.port))


if __name__ == "__main__":
    main()
