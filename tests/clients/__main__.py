"""Starts a topology with this environment's Python, and runs the tests of clients with another's.

``python -m tests.clients .venv-clients/bin/python [options of pytest]``: clients have versions of
their own of libraries that the engine needs, so no environment holds both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from epd_portable.demo import servers

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "front.item_outcomes=true",
    "front.elastic_encode=false",
    "engine_args.enable_auto_tool_choice=true",
    "engine_args.tool_call_parser=granite",
    # The bundled model has seen no JSON: where it may, it writes white space without end.
    "engine_args.structured_outputs_config={backend: xgrammar, disable_any_whitespace: true}",
)

PYTEST = (
    # What lies above is for tests of this environment.
    "--confcutdir=tests/clients",
    # Clients bring plug-ins of their own, and warn of one another.
    *("--disable-plugin-autoload", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"),
    *("-W", "default"),
)


def main(argv: list[str]) -> int:
    """Let the clients send their requests; return the exit status of pytest."""
    python, *options = argv
    with (
        tempfile.TemporaryDirectory(prefix="epd-clients-") as folder,
        servers.topology(
            ROOT / "configs" / "1e1pd.yaml",
            platform="cpu",
            log_dir=Path(folder),
            settings=SETTINGS,
            env={"PYTHONPATH": str(ROOT)},
            report=lambda line: print(line, flush=True),
        ) as server,
    ):
        command = [python, "-m", "pytest", *PYTEST, *options]
        env = {"EPD_CLIENTS_URL": server.url, "EPD_CLIENTS_ENGINE_PYTHON": sys.executable}
        return subprocess.run(
            [*command, "tests/clients"], cwd=ROOT, env={**os.environ, **env}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
