from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from epd_portable.bench.load.context import BenchContext
from epd_portable.bench.load.peers import describe, example_engines, example_proxy, plain_engine
from epd_portable.bench.load.sides import Allotment, LoadSide, read_side, read_sides
from epd_portable.bench.servers import Server
from epd_portable.config.load import load_topology
from epd_portable.config.schema import Topology
from epd_portable.launch.plan.model import resolve_model
from epd_portable.launch.plan.processes import Machine, make_plan
from epd_portable.platforms.traits import TRAITS

ROOT = Path(__file__).resolve().parents[4]
OMP = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "TORCH_COMPILE_DISABLE")


def topology(platform: Any, *overrides: str) -> Topology:
    return load_topology(ROOT / "configs" / "1e1pd.yaml", platform, overrides=overrides)


def context_of(
    side: LoadSide, platform: Any, units: Sequence[str], folder: Path, *overrides: str
) -> BenchContext:
    count = max(1, side.count)
    each = len(units) // count
    allotment = Allotment(
        units={side.name: [tuple(units[at * each :][:each]) for at in range(count)]}, rest=(0,)
    )
    return BenchContext(
        platform=platform,
        topologies={side.name: topology(platform, *overrides)},
        settings=(),
        model=None,
        allotment=allotment,
        folder=folder,
        upstream_proxy=None,
        report=lambda line: None,
    )


def plain(
    platform: Any,
    units: Sequence[str],
    folder: Path,
    *overrides: str,
    tuned: bool = True,
    ranks: int = 1,
) -> Server:
    side = read_side(f"dp:{ranks}{',tuned' if tuned else ''}")
    context = context_of(side, platform, units, folder, *overrides)
    (own,) = context.servers_of(side)
    return plain_engine(side, context, name="replica-0", units=own)


def value(argv: Sequence[str], flag: str) -> str:
    return argv[list(argv).index(flag) + 1]


def test_on_a_cpu_plain_vllm_gets_the_threads_and_executor_of_the_launchers_instances(
    tmp_path: Path,
) -> None:
    peer = plain("cpu", ["2", "3"], tmp_path, "engine_args.seed=7")
    ours = make_plan(
        topology("cpu", "instances.encode.cores=[0, 1]", "instances.prefill_decode.cores=[2, 3]"),
        model=resolve_model("demo"),
        traits=TRAITS["cpu"],
        machine=Machine(devices=None, cores=(0, 1, 2, 3)),
        run_id="0",
        free_port=iter(range(20000, 20100)).__next__,
        temp_dir=str(tmp_path),
    ).processes[1]
    assert {name: peer.env[name] for name in OMP} == {name: ours.env[name] for name in OMP}
    assert peer.env["OMP_NUM_THREADS"] == "2"
    executor = "--distributed-executor-backend"
    assert value(peer.argv, executor) == value(ours.argv, executor)
    assert value(peer.argv, "--seed") == "7"
    assert value(peer.argv, "--dtype") == "bfloat16"
    assert peer.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert not any("epd_portable" in word for word in peer.argv if not word.startswith("/"))


def test_on_a_cpu_stock_vllm_keeps_its_own_executor_on_the_same_cores(tmp_path: Path) -> None:
    peer = plain("cpu", ["2", "3"], tmp_path, tuned=False)
    assert peer.env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert "OMP_NUM_THREADS" not in peer.env
    assert "--distributed-executor-backend" not in peer.argv


def test_ranks_of_data_parallelism_divide_the_cores_and_devices(tmp_path: Path) -> None:
    stock = plain("cpu", ["2", "3"], tmp_path, tuned=False, ranks=2)
    assert stock.env["VLLM_CPU_OMP_THREADS_BIND"] == "2|3"
    assert value(stock.argv, "--data-parallel-size") == "2"
    assert plain("cpu", ["2", "3"], tmp_path, ranks=2).env["OMP_NUM_THREADS"] == "1"
    devices = plain("cuda", ["4", "5", "6", "7"], tmp_path, ranks=2)
    assert value(devices.argv, "--tensor-parallel-size") == "2"


def test_on_devices_plain_vllm_sees_its_devices_and_divides_the_model_among_them(
    tmp_path: Path,
) -> None:
    peer = plain("cuda", ["4", "5"], tmp_path)
    assert peer.env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert value(peer.argv, "--tensor-parallel-size") == "2"
    assert "OMP_NUM_THREADS" not in peer.env
    assert "--distributed-executor-backend" not in peer.argv


@pytest.mark.parametrize(
    ("group", "role"), [("encode", "ec_producer"), ("prefill_decode", "ec_consumer")]
)
def test_the_example_has_the_connector_of_vllm_itself(
    tmp_path: Path, group: str, role: str
) -> None:
    side = read_side("upstream:1E1PD,tuned")
    override = f"instances.{group}.engine_args.max_num_seqs=9"
    context = context_of(side, "cpu", ["1"], tmp_path, override)
    context.allotment.units[side.name] = [("1",), ("2",)]
    encode, prefill_decode = example_engines(side, context, tmp_path / "store")
    peer = encode if group == "encode" else prefill_decode
    assert json.loads(value(peer.argv, "--ec-transfer-config")) == {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    assert value(peer.argv, "--max-num-seqs") == "9"
    assert ("--mm-encoder-only" in peer.argv) == (group == "encode")


def test_the_proxy_asks_both_instances_and_is_the_given_file(tmp_path: Path) -> None:
    side = read_side("upstream:1E1PD")

    def proxy(file: Path | None) -> Server:
        context = context_of(side, "cpu", ["1"], tmp_path)
        return example_proxy(
            side, dataclasses.replace(context, upstream_proxy=file), "http://e", "http://pd"
        )

    stand_in, real = proxy(None), proxy(tmp_path / "disagg_epd_proxy.py")
    assert stand_in.argv[1:3] == ["-m", "epd_portable.bench.load.proxy"]
    assert real.argv[1] == str(tmp_path / "disagg_epd_proxy.py")
    for each in (stand_in, real):
        assert value(each.argv, "--encode-servers-urls") == "http://e"
        assert value(each.argv, "--decode-servers-urls") == "http://pd"
        assert each.url.endswith(value(each.argv, "--port"))


def test_a_page_says_who_runs_as_vllm_does_by_itself_and_who_is_tuned() -> None:
    sides = read_sides(["a.yaml", "replicas:2", "upstream:1E1PD", "dp:2,tuned"], stand_in=False)
    said = describe(sides, None)
    assert said.startswith("Stock, as vLLM runs by itself: replicas, upstream. Tuned, on a CPU ")
    assert "gives its own instances: tuned-dp. The proxy of vLLM's example is a stand-in" in said
    assert describe(sides, Path("any/disagg_epd_proxy.py")).endswith(
        "its own (disagg_epd_proxy.py)."
    )
    assert describe(sides[:1], None) == ""


def test_on_cuda_without_a_compiler_plain_vllm_is_told_what_the_launchers_instances_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name, told), *_ = TRAITS["cuda"].env_without_compiler
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    nvcc = tmp_path / "bin" / "nvcc"
    absent = not any(Path(place).exists() for place in TRAITS["cuda"].compiler)
    assert (plain("cuda", ["0"], tmp_path).env.get(name) == told) == absent
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    assert name not in plain("cuda", ["0"], tmp_path).env
    assert name not in plain("cpu", ["0"], tmp_path).env


def test_what_the_topology_says_of_the_sampler_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    peer = plain("cuda", ["0"], tmp_path, 'env.VLLM_USE_FLASHINFER_SAMPLER="1"')
    assert peer.env["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
