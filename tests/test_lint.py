"""The import rule holds, and a tree that breaks it is caught."""

import subprocess
import sys
from pathlib import Path

import imports
import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_rule_holds_here():
    assert imports.violations(ROOT) == []


def test_every_folder_of_the_package_is_a_stage_or_a_library():
    folders = {p.name for p in (ROOT / "openforge").iterdir() if (p / "__init__.py").is_file()}
    assert folders == {*imports.STAGES, *imports.LIBRARIES, "verbs"}


@pytest.mark.parametrize(
    ("file", "source", "why"),
    [
        ("plan/__init__.py", "from openforge import rollout", "stage rollout comes after plan"),
        ("plan/draw.py", "from openforge.rollout.engine import run", "stage rollout comes after plan"),
        ("plan/draw.py", "from ..samples import build", "stage samples comes after plan"),
        ("plan/__init__.py", "from ..samples import build", "stage samples comes after plan"),
        ("score/__init__.py", "def f():\n    import openforge.report.page", "stage report comes after score"),
        (
            "tasks/a.py",
            "import importlib\nimportlib.import_module('openforge.eval')",
            "stage eval comes after",
        ),
        (
            "tasks/a.py",
            "if TYPE_CHECKING:\n    from openforge.train import x",
            "stage train comes after tasks",
        ),
        (
            "proxy/server.py",
            "from openforge.environments.verdict import x",
            "proxy knows nothing of environments",
        ),
        (
            "environments/a.py",
            "from openforge.proxy import server",
            "environments knows nothing of proxy but",
        ),
        ("environments/a.py", "from openforge import proxy", "environments knows nothing of proxy but"),
        ("train/epoch.py", "import openforge.proxy.journal", "train knows nothing of proxy"),
        ("train/epoch.py", "from openforge import environments", "train knows nothing of environments"),
        ("policy/server.py", "from openforge.plan import train_table", "a library imports no stage"),
        ("sandboxes/local.py", "from openforge.rollout import engine", "a library imports no stage"),
        ("tables.py", "from openforge import policy", "a meeting place imports no stage and no library"),
        ("store.py", "from . import report", "a meeting place imports no stage and no library"),
        ("rollout/status.py", "from openforge.rollout import engine", "a meeting place imports no stage"),
        ("report/page.py", "from openforge.verbs.sizes import said", "only the command line imports its verbs"),
        ("job.py", "import openforge.cli", "only the command line imports its verbs"),
    ],
)
def test_a_violation_is_caught(tmp_path, file, source, why):
    tree(tmp_path, {file: source})
    (sentence,) = imports.violations(tmp_path)
    assert sentence.startswith(f"openforge/{file}:{source.count(chr(10)) + 1}: must not import openforge.")
    assert why in sentence


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("rollout/engine.py", "from openforge import plan, policy, proxy, sandboxes, tables"),
        ("samples/__init__.py", "from openforge.rollout.status import ENDS"),
        ("proxy/server.py", "from openforge.rollout.status import ENDS"),
        ("environments/a.py", "from openforge.proxy.llm_args import LlmArgs"),
        ("train/epoch.py", "from openforge import samples, policy, config"),
        ("report/page.py", "from openforge.eval.estimate import clustered\nimport openforge.rollout.status"),
        ("policy/a.py", "import json\nfrom openforge.policy.models import x\nfrom . import models"),
        ("cli.py", "from openforge import report, tasks"),
        ("cli.py", "from openforge.verbs import doctor"),
        ("verbs/plan.py", "from openforge.verbs import sizes\nfrom openforge import train"),
    ],
)
def test_what_is_allowed_passes(tmp_path, file, source):
    tree(tmp_path, {file: source})
    assert imports.violations(tmp_path) == []


def tree(root: Path, files: dict[str, str]) -> None:
    """A package with every stage and library, empty but for `files`."""
    names = [f"{f}/__init__.py" for f in (*imports.STAGES, *imports.LIBRARIES)]
    names += ["__init__.py", "rollout/status.py", "rollout/engine.py", "report/page.py", "proxy/server.py"]
    for name in {*names, *files}:
        path = root / "openforge" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, ""))


def test_the_command_of_make_lint_names_violations(tmp_path):
    tree(tmp_path, {"plan/__init__.py": "from openforge import report"})
    (tmp_path / "tests").mkdir()
    script = tmp_path / "tests" / "imports.py"
    script.write_text(Path(imports.__file__).read_text())
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "openforge/plan/__init__.py:1: must not import openforge.report" in done.stderr
