"""mini-swe-agent: repairs a small repository, whose test fails. The reward is whether the test passes in the end."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or litellm asks github.com for prices
os.environ["MSWEA_SILENT_STARTUP"] = "1"

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

sys.stdin.read()
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "sums.py").write_text("def add(a, b):\n    return a - b\n")
    Path(folder, "test_sums.py").write_text("from sums import add\n\nassert add(3, 4) == 7\n")
    config = yaml.safe_load((package_dir / "config/mini.yaml").read_text())
    own = {name: config["agent"][name] for name in ("system_template", "instance_template")} | {"step_limit": 6}
    shown = {name: value for name, value in config["model"].items() if name.endswith("template")}
    model = LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors", **shown)
    ended = DefaultAgent(model, LocalEnvironment(cwd=folder), **own).run("python test_sums.py fails")
    passes = subprocess.run([sys.executable, "test_sums.py"], cwd=folder, capture_output=True).returncode == 0
print(json.dumps({"reward": passes, "submitted": ended["exit_status"] == "Submitted"}))
