"""The simulated user: what it is asked, what the agent hears of it, and an outage that is never a reward."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_stub import ChatStub
from stub_harness import StubHarness

from openforge.environments.claw_eval import user as module
from openforge.environments.claw_eval.setup import Setup, User
from openforge.rollout.status import ENDS

VERIFY = """
import json, sys
rounds = json.load(open(sys.argv[1] + "/episode.json"))["user_rounds"]
print(json.dumps({"score": 1, "passed": True, "rounds": rounds}))
"""
COMMAND = ("python3", "-I", "verify.py", "{evidence}")
ASKS = Setup(user=User("A baker who wants bread.", 3, "Ask the user whatever you need to know."))


class Resuming(StubHarness):
    """A stub that goes on by itself: its next instruction is the user's message alone. It says how it was started."""

    resumes = True

    def files(self, ctx: Any) -> dict[str, bytes]:
        return {"task.sh": f"echo {'again' if ctx.again else 'first'}".encode(), "task.md": ctx.instruction.encode()}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACK_OFF", 0.001)


def judge(stub: ChatStub) -> dict[str, Any]:
    return {"url": stub.url, "model": "m", "api_key_env": "USER_KEY"}


async def test_the_agent_is_answered_until_the_user_is_content(episode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_KEY", "k1")
    async with ChatStub(["Rye, please.", "[DONE]"]) as stub:
        done = await episode("true", VERIFY, command=COMMAND, setup=ASKS, judge=judge(stub), harness=Resuming())
    assert (done.status, done.user_rounds, done.answer) == ("completed", 1, "again\n")
    assert json.loads(done.verifier_output)["rounds"] == 1
    assert stub.keys == ["Bearer k1"] * 2 and {a["model"] for a in stub.asked} == {"m"}
    system, _, *talk = stub.asked[1]["messages"]
    assert "A baker who wants bread." in system["content"]
    # The model plays the user: what the user said is its own.
    assert [m["role"] for m in talk] == ["assistant", "user", "assistant", "user"]
    assert [m["content"] for m in talk][1:] == ["first\n", "Rye, please.", "again\n"]
    assert talk[0]["content"].endswith("Ask the user whatever you need to know.")
    assert (await done.sandbox.download_content("/home/agent/task.md")) == b"Rye, please."


async def test_a_harness_that_cannot_resume_is_told_the_conversation(episode: Any) -> None:
    async with ChatStub(["Rye, please.", "And quickly.", "Thanks.", "never asked"]) as stub:
        done = await episode("echo Which bread?", VERIFY, command=COMMAND, setup=ASKS, judge=judge(stub))
    # Three rounds are its most.
    assert (done.user_rounds, len(stub.asked)) == (3, 3)
    text = (await done.sandbox.download_content("/home/agent/task.md")).decode()
    assert text.startswith("echo Which bread?") and text.endswith("User: Thanks.")
    assert text.index("You: Which bread?") < text.index("User: Rye, please.") < text.index("User: And quickly.")


async def test_what_passes_is_tried_again(episode: Any) -> None:
    async with ChatStub([429, 503, None, "[DONE]"]) as stub:
        done = await episode("echo hi", VERIFY, command=COMMAND, setup=ASKS, judge=judge(stub))
    assert (done.status, done.user_rounds, len(stub.asked)) == ("completed", 0, 4)


@pytest.mark.parametrize(("says", "asked"), [([401], 1), ([500] * 4, 4), ([None] * 4, 4)])
async def test_an_outage_is_a_status_of_its_own_and_no_reward(episode: Any, says: list[Any], asked: int) -> None:
    async with ChatStub(says) as stub:
        done = await episode("echo hi", VERIFY, command=COMMAND, setup=ASKS, judge=judge(stub))
    assert done.status == "user_failed" and done.verifier_output is None and len(stub.asked) == asked
    assert done.message.startswith(f"the simulated user's model m at {stub.url} gave no message: ")
    assert ENDS["user_failed"].retried and not ENDS["user_failed"].verified


async def test_a_task_with_a_user_and_no_endpoint_is_unsupported(episode: Any) -> None:
    done = await episode("echo hi", VERIFY, command=COMMAND, setup=ASKS)
    assert (done.status, done.verifier_output) == ("unsupported", None) and "judge.url" in done.message


async def test_an_agent_that_failed_hears_nothing_more(episode: Any) -> None:
    async with ChatStub(["never asked"]) as stub:
        done = await episode("echo hi; exit 3", VERIFY, command=COMMAND, setup=ASKS, judge=judge(stub))
    assert done.status == "agent_error" and not stub.asked and done.verifier_output is not None
