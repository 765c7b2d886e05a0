from __future__ import annotations

import pytest

from tests import warm
from tests.kit.commands import python


@pytest.mark.parametrize("module", ["registry", "traits", "base", "torchvision_guard"])
def test_imports_of_a_planner_leave_torch_out(module: str) -> None:
    result = python(
        f"import sys; import epd_portable.platforms.{module}; "
        "from epd_portable.platforms.registry import TRAITS; tuple(TRAITS); "
        "print(sorted(name for name in sys.modules if name.startswith('torch')"
        " and name != 'epd_portable.platforms.torchvision_guard'))"
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_platform_probes_create_no_device_context() -> None:
    result = warm.nursery().run(
        "-c",
        "import torch; from epd_portable.platforms import registry;"
        "[registry.availability(name) for name in registry.TRAITS];"
        "print(torch.cuda.is_initialized())",
        timeout=60,
    )
    assert result.stdout.strip() == "False", result.stderr
