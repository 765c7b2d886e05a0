from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epd_benchmarks.load.sides import (
    Allotment,
    LoadSetting,
    example_proxy,
    plain_engines,
    read_side,
)
from epd_portable.config.load import load_topology
from epd_portable.demo.servers import Server
from epd_portable.launch.plan.machine import Machine
from epd_portable.launch.plan.request import PlanRequest

ROOT = Path(__file__).resolve().parents[4]
OMP = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "TORCH_COMPILE_DISABLE")
EXECUTOR = "--distributed-executor-backend"


def topology(platform: Any, *overrides: str) -> Any:
    return load_topology(ROOT / "configs" / "1e1pd.yaml", platform, overrides=overrides)


def setting_of(
    what: str, platform: Any, units: Sequence[tuple[str, ...]], folder: Path, *overrides: str
) -> tuple[Any, LoadSetting]:
    side = read_side(what)
    return side, LoadSetting(
        sides=(side,),
        platform=platform,
        topologies={side.name: topology(platform, *overrides)},
        settings=(),
        allotment=Allotment(units={side.name: list(units)}, rest=(0,), binds_cores=True),
        folder=folder,
        upstream_proxy=folder / "disagg_epd_proxy.py",
    )


def plain(
    platform: Any, units: tuple[str, ...], folder: Path, *overrides: str, tuned: bool
) -> Server:
    what = f"replicas:1{',tuned' if tuned else ''}"
    (server,) = plain_engines(*setting_of(what, platform, [units], folder, *overrides), "")
    return server


def value(argv: Sequence[str], flag: str) -> str:
    return argv[list(argv).index(flag) + 1]


def test_tuned_cpu_baseline_has_launcher_threads_and_executor(tmp_path: Path) -> None:
    peer = plain("cpu", ("2", "3"), tmp_path, "engine_args.seed=7", tuned=True)
    cores = ("instances.encode.cores=[0, 1]", "instances.prefill_decode.cores=[2, 3]")
    config = ROOT / "configs" / "1e1pd.yaml"
    request = PlanRequest.from_options(platform="cpu", config=config, overrides=cores)
    machine = Machine(devices=None, cores=(0, 1, 2, 3))
    ours = request.plan(request.load(), "0", machine, temp_dir=str(tmp_path)).processes[1]
    assert {name: peer.env[name] for name in OMP} == {name: ours.env[name] for name in OMP}
    assert value(peer.argv, EXECUTOR) == value(ours.argv, EXECUTOR)
    assert (value(peer.argv, "--seed"), value(peer.argv, "--dtype")) == ("7", "bfloat16")
    assert not any("epd_portable" in word for word in peer.argv if not word.startswith("/"))


def test_stock_cpu_baseline_has_its_own_executor_and_threads(tmp_path: Path) -> None:
    peer = plain("cpu", ("2", "3"), tmp_path, tuned=False)
    assert peer.env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert "OMP_NUM_THREADS" not in peer.env and EXECUTOR not in peer.argv


def test_device_baseline_divides_the_model_among_devices(tmp_path: Path) -> None:
    peer = plain("cuda", ("4", "5"), tmp_path, tuned=True)
    assert peer.env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert value(peer.argv, "--tensor-parallel-size") == "2"
    assert "OMP_NUM_THREADS" not in peer.env and EXECUTOR not in peer.argv


def test_the_example_has_vllms_own_connector_and_the_named_proxy(tmp_path: Path) -> None:
    override = "instances.encode.engine_args.max_num_seqs=9"
    units = [("1",), ("2",)]
    side, setting = setting_of("upstream:1E1PD,tuned", "cpu", units, tmp_path, override)
    encode, prefill_decode = plain_engines(side, setting, str(tmp_path / "store"))
    proxy = example_proxy(side, setting, encode.url, prefill_decode.url)
    for peer, role in ((encode, "ec_producer"), (prefill_decode, "ec_consumer")):
        assert json.loads(value(peer.argv, "--ec-transfer-config")) == {
            "ec_connector": "ECExampleConnector",
            "ec_role": role,
            "ec_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
        }
        assert ("--mm-encoder-only" in peer.argv) == (peer is encode)
    assert value(encode.argv, "--max-num-seqs") == "9"
    assert proxy.argv[1] == str(setting.upstream_proxy)
    assert value(proxy.argv, "--encode-servers-urls") == encode.url
    assert value(proxy.argv, "--decode-servers-urls") == prefill_decode.url
    assert proxy.url.endswith(value(proxy.argv, "--port"))
