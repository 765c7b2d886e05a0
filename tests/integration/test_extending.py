"""The examples of docs/extending.md, taken out of the page, hold the contracts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(?:python|toml)\n# ([\w.: -]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TIMEOUT_S = 500


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both examples, as an installer leaves it."""
    folder = tmp_path_factory.mktemp("site")
    blocks = dict(BLOCK.findall((ROOT / "docs/extending.md").read_text("utf-8")))
    for name, text in blocks.items():
        if not name.endswith("pyproject.toml"):
            (folder / name).write_text(text)
            continue
        project = tomllib.loads(text)
        assert {f"{each}.py" for each in project["tool"]["setuptools"]["py-modules"]} <= set(blocks)
        info = folder / f"{project['project']['name'].replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['project']['name']}\n"
        )
        lines = []
        for group, points in project["project"]["entry-points"].items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    assert len(list(folder.iterdir())) == 6
    return folder


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=f"{site}{os.pathsep}{ROOT}"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_both_are_found_without_importing_torch_or_what_nobody_asked_for(site: Path) -> None:
    code = (
        "import sys\n"
        "from epd_portable.config.load import parse_topology\n"
        "from epd_portable.connector import registry\n"
        "from epd_portable.platforms.traits import TRAITS\n"
        "text = 'model: demo\\nplatform: {frugal: {transfer: {path: unix}}}'\n"
        "made = parse_topology(text, 'frugal')\n"
        "def theirs(): return sorted(m for m in sys.modules if m.startswith(('epd_u', 'epd_f')))\n"
        "print(made.transfer.path, list(TRAITS), theirs())\n"
        "offered = [each.name for each in registry.offered('auto', 'frugal')]\n"
        "print(offered, 'torch' in sys.modules, theirs())\n"
    )
    ended = run(site, "-c", code)
    assert ended.stdout.splitlines() == [
        "unix ['cuda', 'npu', 'cpu', 'frugal'] []",
        "['shm', 'unix', 'tcp'] False ['epd_frugal_platform', 'epd_unix_path']",
    ], ended.stderr


def test_the_launcher_plans_and_checks_with_them(site: Path) -> None:
    main = ("-m", "epd_portable.launch.cli")
    options = (
        "--platform",
        "frugal",
        "--config",
        "configs/1e1pd.yaml",
        "--set",
        "transfer.path=unix",
    )
    planned = run(site, *main, "plan", *options, "--json")
    assert "epd_portable.vllm_plugin.worker.EPDFrugalWorker" in planned.stdout, planned.stderr
    checked = run(site, *main, "check", "--platform", "frugal")
    assert re.search(r"frugal/unix .*chunks over a Unix socket", checked.stdout), checked.stdout


# What follows from the page's other example, or takes long to import, runs with --full only.
@pytest.mark.full
def test_the_worker_of_a_platform_extends_the_one_that_its_traits_name(site: Path) -> None:
    pytest.importorskip("vllm")
    code = (
        "from epd_portable.vllm_plugin import worker\n"
        "print([each.__name__ for each in worker.EPDFrugalWorker.__mro__[:3]])"
    )
    ended = run(site, "-c", code)
    expected = "['EPDFrugalWorker', '_WorkerMixin', 'CPUWorker']"
    assert ended.stdout.splitlines()[-1:] == [expected], ended.stderr[-2000:]


@pytest.mark.parametrize(
    ("suite", "words", "at_least"),
    [
        ("tests/contract/test_transport.py", "unix and cpu-to-cpu", 50),
        pytest.param("tests/contract/test_transport.py", "frugal", 300, marks=pytest.mark.full),
        pytest.param(
            "tests/contract/test_collective_group.py", "frugal", 1, marks=pytest.mark.full
        ),
    ],
)
def test_the_contract_suite_passes_over_what_the_page_builds(
    site: Path, suite: str, words: str, at_least: int
) -> None:
    options = ("-q", "-p", "no:cacheprovider", "--durations=0", "-n0")
    ended = run(site, "-m", "pytest", suite, "-k", words, *options)
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert ended.returncode == 0 and passed, ended.stdout[-5000:]
    assert int(passed[1]) >= at_least


def test_a_package_that_does_not_load_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\n")
    points = "[epd_portable.transfer_paths]\nbroken = nowhere:PATH\n[epd_portable.platforms]\n"
    (info / "entry_points.txt").write_text(f"{points}odd = epd_portable.envs:TABLE\n")
    code = (
        "from epd_portable.connector import registry\n"
        "from epd_portable.platforms.traits import TRAITS\n"
        "from epd_portable.errors import ConfigError\n"
        "print(registry.entry('tcp').name, TRAITS['cpu'].name)\n"
        "for ask in (lambda: registry.entry('broken'), lambda: TRAITS['odd']):\n"
        "    try:\n"
        "        ask()\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
    )
    first, second, third = run(tmp_path, "-c", code).stdout.splitlines()
    assert first == "tcp cpu"
    assert "(nowhere:PATH) cannot be loaded" in second and "No module named 'nowhere'" in second
    assert "is tuple" in third and "expected a PlatformTraits" in third
