"""Each test runs a process of its own: what is imported cannot be imported again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import warm
from tests.kit.commands import Ended, python

INSTALL = "from epd_portable.platforms import torchvision_guard as guard; guard.install(); "
LOG = "import logging; logging.basicConfig(level=logging.DEBUG); "


def run(code: str, *, path: Path | None = None, with_torch: bool = False) -> Ended:
    """Run it in a new python; one that has torch already, which takes long, if that is said."""
    more = {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    if with_torch:
        return warm.nursery().run("-c", code, env={**os.environ, **more}, timeout=60)
    return python(code, **more)


def package(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_installing_imports_neither_torch_nor_torchvision() -> None:
    result = run(
        INSTALL + "import sys; print([n for n in ('torch', 'torchvision') if n in sys.modules])"
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_installing_twice_watches_once_and_offers_no_platform() -> None:
    result = run(
        INSTALL + "import sys; print(guard.install(), "
        "sum(isinstance(finder, guard.MediaGuard) for finder in sys.meta_path))"
    )
    assert result.stdout.strip() == "None 1", result.stderr


TORCHVISION = {
    "torchvision/__init__.py": "from . import extension\nfrom . import _meta_registrations\n",
    "torchvision/_meta_registrations.py": (
        "import torch\n"
        "assert hasattr(torch.ops.torchvision, 'nms'), 'operator torchvision::nms does not exist'\n"
    ),
}


def test_operators_missing_are_declared_and_logged(tmp_path: Path) -> None:
    extension = {"torchvision/extension.py": "def _has_ops(): return False\n"}
    path = package(tmp_path, TORCHVISION | extension)
    bare = run("import torchvision", path=path, with_torch=True)
    assert "torchvision::nms does not exist" in bare.stderr
    result = run(LOG + INSTALL + "import torchvision", path=path, with_torch=True)
    assert result.returncode == 0, result.stderr
    assert "declared nms, qnms" in result.stderr


def test_a_torchvision_whose_operators_load_is_left_untouched(tmp_path: Path) -> None:
    extension = {
        "torchvision/extension.py": (
            "import torch\n"
            "library = torch.library.Library('torchvision', 'DEF')\n"
            "library.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
            "def _has_ops(): return True\n"
        )
    }
    result = run(
        LOG + INSTALL + "import torchvision; print(guard._declared)",
        path=package(tmp_path, TORCHVISION | extension),
        with_torch=True,
    )
    assert result.stdout.strip() == "None", result.stderr
    assert "are loaded: left untouched" in result.stderr


def test_operators_declared_elsewhere_are_not_declared_again(tmp_path: Path) -> None:
    extension = {
        "torchvision/extension.py": (
            "import torch\n"
            "library = torch.library.Library('torchvision', 'DEF')\n"
            "for name in ('nms', 'qnms'):\n"
            "    library.define(name + '(Tensor dets, Tensor scores, float iou) -> Tensor')\n"
            "def _has_ops(): return False\n"
        )
    }
    result = run(
        INSTALL + "import torchvision; print(guard._declared)",
        path=package(tmp_path, TORCHVISION | extension),
        with_torch=True,
    )
    assert result.stdout.strip() == "None", result.stderr


@pytest.mark.parametrize(
    ("loads", "expected"), [("return True", "True"), ("raise OSError", "False")]
)
def test_torchaudio_learns_of_its_compiled_part(tmp_path: Path, loads: str, expected: str) -> None:
    path = package(
        tmp_path,
        {
            "torchaudio/__init__.py": "from ._extension import available\n",
            "torchaudio/_extension/__init__.py": (
                "from .utils import _load_lib\navailable = _load_lib('_torchaudio')\n"
            ),
            "torchaudio/_extension/utils.py": f"def _load_lib(lib):\n    {loads}\n",
        },
    )
    result = run(INSTALL + "import torchaudio; print(torchaudio.available)", path=path)
    assert result.stdout.strip() == expected, result.stderr


@pytest.mark.parametrize(
    ("loads", "expected"), [("pass", "imported"), ("raise OSError('libnvrtc')", "ImportError")]
)
def test_a_broken_torchcodec_is_absent(tmp_path: Path, loads: str, expected: str) -> None:
    path = package(
        tmp_path,
        {
            "torchcodec/__init__.py": (
                "from ._internally_replaced_utils import load_image_library\nload_image_library()\n"
            ),
            "torchcodec/_internally_replaced_utils.py": (
                f"def load_image_library():\n    {loads}\n"
            ),
        },
    )
    result = run(
        INSTALL + "\ntry:\n    import torchcodec; print('imported')\n"
        "except ImportError as error:\n    print('ImportError')",
        path=path,
    )
    assert result.stdout.strip() == expected, result.stderr


def test_libraries_of_another_make_are_left_as_they_are(tmp_path: Path) -> None:
    path = package(
        tmp_path,
        {"torchcodec/__init__.py": "", "torchcodec/_internally_replaced_utils.py": "x = 1\n"},
    )
    result = run(
        INSTALL + "import torchcodec._internally_replaced_utils as m, importlib.machinery as im;"
        "print(m.x, type(m.__loader__) is type(m.__spec__.loader) is im.SourceFileLoader)",
        path=path,
    )
    assert result.stdout.strip() == "1 True", result.stderr
