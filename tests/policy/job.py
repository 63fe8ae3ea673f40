"""A job of the lease tests: leases a policy, says so on stdout, keeps it until stdin ends.

usage: job.py ROOT STATE_DIR POLICY NAME
"""

import sys
from pathlib import Path

from openforge.config import Server
from openforge.policy.lease import lease

root, state, policy = (Path(a) for a in sys.argv[1:4])


def say(line: str) -> None:
    print(line, flush=True)


with lease(Server(), policy, f"{policy.name}@0", state_dir=state, job=sys.argv[4], root=root, progress=say) as endpoint:
    say(f"leased {endpoint.base_url} {endpoint.api_key}")
    sys.stdin.read()
say("released")
