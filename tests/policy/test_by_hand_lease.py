"""An episode by hand and policy servers: a running run's is shared and left, its own ends with it."""

import os
import subprocess
import sys
from pathlib import Path

from policy_rig import Stub, until

from openforge.policy import process
from openforge.policy.state import places

LEASE = """
import sys
from pathlib import Path
from openforge.config import Server
from openforge.policy.lease import lease
from openforge.rollout import by_hand
root, policy = map(Path, sys.argv[1:])
server = by_hand._attached_or_own(Server(), policy, root)
with by_hand._owning(), lease(server, policy, "a@0", state_dir=root / ".servers", job="by hand", root=root) as e:
    print(e.base_url)
"""


def leased(stub: Stub) -> str:
    """Lease a server in a process of its own, as an episode by hand does; its base URL."""
    if not (stub.root / ".servers").exists():
        (stub.root / ".servers").symlink_to(stub.state)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    argv = [sys.executable, "-c", LEASE, str(stub.root), str(stub.policy("a"))]
    return subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def test_the_server_of_a_running_run_is_used_and_goes_on(stub: Stub) -> None:
    job = stub.job("a", owner=stub.owner())
    url, record = job.leased(), stub.record()
    assert leased(stub) == url
    assert stub.log() == ["start a"] and stub.record() == record
    job.end()
    # It ends with its run: whoever ran an episode by hand is not its owner for good.
    stub.end_owner()
    until(lambda: not any(map(process.alive, record)), "the end of the run's server")


def test_without_one_it_has_a_server_of_its_own_that_ends_with_it(stub: Stub) -> None:
    leased(stub)
    assert stub.log() == ["start a"] and places(stub.state) == []
