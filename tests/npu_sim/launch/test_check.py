"""``epd-launch check`` on simulated devices, in a process that imports everything itself."""

from __future__ import annotations

import json

from epd_portable.transfer.registry import PATHS
from tests.npu_sim.platform.children import run_afresh

PAIRS = {"npu": {"ipc", "shm", "collective", "tcp"}, "npu→cpu": {"shm", "tcp"}}
CHECK = "from epd_portable.launch.cli import main; main(['check', '--json'])"


def test_devices_memory_and_paths_of_each_pair_are_listed() -> None:
    printed = run_afresh(CHECK, ASCEND_SIM_DEVICES="2", ASCEND_SIM_MEM_MB="2048")
    # torch_npu writes warnings to standard output, before the document.
    findings = json.loads(printed[printed.index("\n{") :] if printed[0] != "{" else printed)
    found = {(each["kind"], each["name"]): each for each in findings["findings"]}
    assert all(each["reason"] for each in found.values())
    assert found["engine", "vllm-ascend"]["usable"]
    assert found["platform", "npu"]["reason"].endswith("2 devices")
    for index in (0, 1):
        device = found["device", f"npu:{index}"]
        assert device["usable"] and device["reason"].endswith("of 2.00 GiB are free")
    for pair, paths in PAIRS.items():
        of_pair = {
            name.rpartition("/")[2]: each["usable"]
            for (kind, name), each in found.items()
            if kind == "path" and name.rpartition("/")[0] == pair
        }
        assert of_pair.keys() == {path.name for path in PATHS}
        # NIXL may be installed or not.
        assert {name for name, usable in of_pair.items() if usable} - {"nixl"} == paths
