"""A rollout job of its own process: python runner.py FOLDER URL AGENT runs rollout "a" and rests if it ever ends."""

import asyncio
import sys
from pathlib import Path

from shard_rig import PARTIAL, make_proxy, make_shard, row

from openforge.sandboxes import LocalBackend, Owner


async def main() -> None:
    folder, url, agent = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    proxy = make_proxy(folder / PARTIAL, url)
    async with LocalBackend(folder / "sandboxes", "r", Owner.current()) as backend:
        await make_shard(folder / PARTIAL, url, proxy, backend, [row("a", agent=agent)]).run()
    await proxy.stop()


asyncio.run(main())
