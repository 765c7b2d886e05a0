"""The first hour on a device: its stages with stand-ins, its calls and what is carried for real."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ci import carry, true_shapes
from ci.first_hour import CALL_AGAIN, PIECES, REHEARSALS, TARGETS, Hour, Stage, stages
from epd_benchmarks.load.serve import read_points
from epd_benchmarks.load.sides import read_sides
from tests.first_hour.reference import url_of
from tests.kit import commands
from tests.kit.commands import Ended
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def stage(name: str, script: str, limit_s: float = 60.0, **options: Any) -> Stage:
    return Stage(name=name, argv=("sh", "-c", script, name, "{out}"), limit_s=limit_s, **options)


def run(out: Path, *stages: Stage) -> dict[str, Any]:
    hour = Hour(out, stages, "cpu")
    hour.run(total_s=600)
    return hour.told


def runs(process: str) -> bool:
    """Tell whether a process, which may be ending just now, is there and no zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_failed_stage_leaves_its_figures(tmp_path: Path) -> None:
    told = run(
        tmp_path,
        stage("first", """echo why; echo '{"figure": "rate", "value": [1, 2]}'; exit 3"""),
        Stage(name="none", argv=("/nowhere/at/all",), limit_s=1),
        stage("last", """echo '{"a": 1}' > "$1/b.json" """, writes="b.json"),
    )
    assert [told[name]["status"] for name in ("first", "none", "last")] == [3, None, 0]
    assert (told["first"]["figures"], told["first"]["tail"][0]) == ({"rate": [1, 2]}, "why")
    assert "No such file" in told["none"]["tail"][0]
    assert told["last"]["figures"] == {"b.json": {"a": 1}}


@pytest.mark.parametrize("how", ["", "setsid"], ids=["child", "session-of-its-own"])
def test_late_stage_is_ended_with_children_and_retried(tmp_path: Path, how: str) -> None:
    script = (
        f"""echo '{{"figure": "half", "value": 1}}'; {how} sleep 300 & echo $! > "$1/child"; wait"""
    )
    long = stage("long", script, limit_s=3.0)
    told = run(tmp_path, long, stage("next", "true"))
    assert (told["long"]["status"], told["long"]["figures"]) == (None, {"half": 1})
    assert Hour(tmp_path, [long], "cpu").due == [long]
    child = (tmp_path / "child").read_text().strip()
    until(lambda: not runs(child))


def test_call_ends_in_time_and_the_next_waits_for_the_rest(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(
        f"#!/bin/sh\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.1; done"
    )
    (programs / "nvidia-smi").chmod(0o755)
    argv = [sys.executable, "-m", "ci.first_hour", "cuda", "--out", str(tmp_path / "out")]

    def call(call_s: str) -> Ended:
        path = f"{programs}:{os.environ['PATH']}"
        return commands.run(*argv, "--stage", "machine", "--call-s", call_s, PATH=path)

    assert [call("0").returncode, call("0").returncode] == [CALL_AGAIN, CALL_AGAIN]
    (tmp_path / "go").touch()
    last = call("60")
    assert (last.returncode, "| machine | 0.0 |" in last.stdout) == (0, True), last.stdout
    assert (tmp_path / "out" / "progress.log").read_text().count("machine: at most") == 1


def test_pieces_are_taken_in_any_order_before_engines(tmp_path: Path) -> None:
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir()
    content = {"small.whl": os.urandom(700), "engine.whl": os.urandom(5000)}
    for name, data in content.items():
        (wheels / name).write_bytes(data)
    pieces = carry.split(wheels, tmp_path / "pieces", piece_bytes=1000)
    assert len(pieces) == 6
    late = pieces.pop(2)
    for piece in reversed(pieces):
        carry.take(piece, out / PIECES)
    assert carry.missing(out / PIECES) == "pieces 2 of 6"
    assert [file.name for file in (out / PIECES / carry.WHOLE).iterdir()] == ["small.whl"]
    ran = [
        stage(name, f"""echo {name} >> "$1/ran"; {end}""", engine=name == "engines")
        for name, end in (("fails", "false"), ("soon", "true"), ("engines", "true"))
    ]
    for chosen in (ran[:2], ran[:2], ran):
        assert run(out, *chosen).keys() == {"fails", "soon"}
    carry.take(late, out / PIECES)
    for name, data in content.items():
        assert (out / PIECES / carry.WHOLE / name).read_bytes() == data
    run(out, *ran)
    # What has failed is run again once all is there, behind what has not run.
    assert (out / "ran").read_text().split() == ["fails", "soon", "engines", "fails"]


def test_a_piece_that_was_damaged_on_its_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"content")
    (piece,) = carry.split(tmp_path, tmp_path / "pieces", piece_bytes=1000)
    next(piece.glob("piece.*")).write_bytes(b"c0ntent")
    with pytest.raises(SystemExit, match="carry its pieces again"):
        carry.take(piece, tmp_path / "out")


def test_installed_files_are_compiled_without_bytecode_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    info, whole = "engine-1.dist-info", tmp_path / carry.WHOLE
    whole.mkdir()
    with zipfile.ZipFile(whole / "engine-1-py3-none-any.whl", "w") as file:
        file.writestr("engine.py", "")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: engine\nVersion: 1\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: any\n")
        file.writestr(f"{info}/RECORD", "")
    carry.install(tmp_path, tmp_path / "site", tmp_path / "cache")
    assert [file.suffix for file in (tmp_path / "site" / "__pycache__").iterdir()] == [".pyc"]


def test_carried_model_infos_are_in_the_cache_of_vllm(tmp_path: Path) -> None:
    cut, out = tmp_path / "cut", tmp_path / "out"
    cut.mkdir()
    (cut / "a-Model.json").write_text("{}")
    (piece,) = carry.split(cut, tmp_path / "pieces", piece_bytes=1000)
    argv = [sys.executable, "-m", "ci.first_hour", "cuda", "--out", str(out), "--stage", "machine"]
    commands.run(*argv, "--take", piece)
    told = run(out, stage("engine", 'cat "$VLLM_CACHE_ROOT/modelinfos/a-Model.json"', engine=True))
    assert (told["engine"]["status"], told["engine"]["tail"]) == (0, ["{}"])


def test_reference_starts_with_the_stage_that_uses_it(tmp_path: Path) -> None:
    """The stage finds in the reference's log its address, or its end."""
    waits_for_it = """until grep -qx ended "$EPD_TEST_REFERENCE"; do sleep 0.1; done"""
    hour = Hour(tmp_path, [stage("compares", waits_for_it, compares=True)], "no platform")
    hour.run(total_s=600)
    assert hour.told["compares"]["status"] == 0
    assert url_of(tmp_path / "reference.log") == ""


def test_wheel_has_device_code_of_one_architecture(tmp_path: Path) -> None:
    def code(kind: int, compute: int, text: bytes) -> bytes:
        return carry.CODE.pack(kind, 257, 64, len(text), compute) + bytes(32) + text

    kept, others = code(2, 90, b"hopper"), code(2, 80, b"ampere") + code(1, 90, b"compiled later")
    host, magic = b"host code", carry.MAGIC.to_bytes(4, "little")
    begin = carry.FATBIN.pack(carry.MAGIC, 1, 16, len(kept + others))
    library = host + magic + host + begin + others + kept + host + magic
    wheel = tmp_path / "engine-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("engine/_C.so", library)
        file.writestr("engine/_C.txt", library)
    carry.trim(wheel, 90)
    with zipfile.ZipFile(wheel) as file:
        found, text = file.read("engine/_C.so"), file.read("engine/_C.txt")
    assert text == library
    assert found == library.replace(b"ampere", bytes(6)).replace(b"compiled later", bytes(14))


@pytest.mark.parametrize("target", [*TARGETS.values(), *REHEARSALS.values()], ids=str)
def test_every_stage_calls_what_is_there(target: Any) -> None:
    found = stages(target)
    assert len({each.name for each in found}) == len(found)
    assert all(each.limit_s <= 540 for each in found)
    for each in found:
        argv = [word.replace("{out}", "/out") for word in each.argv]
        for word in argv:
            if re.fullmatch(r"(tests|configs)/\S+", word):
                assert (ROOT / word).exists(), word
        for index, module in enumerate(argv):
            if module.startswith("epd_") and argv[index - 1] == "-m":
                command = importlib.import_module(module).main
                said = CliRunner().invoke(command, [*argv[index + 1 :], "--help"])
                assert said.exit_code == 0, said.output
        read_points([word for option, word in pairwise(argv) if option == "--point"])
        read_sides([word for option, word in pairwise(argv) if option == "--side"])
        assert not each.writes or f"/out/{each.writes}" in argv


def test_load_at_parts_of_saturation(tmp_path: Path) -> None:
    file = tmp_path / "bursts.json"

    def sample(side: str, point: str, throughput: float) -> dict[str, Any]:
        return {"side": side, "point": point, "vllm": {"request_throughput": throughput}}

    burst = "prompts=200,share=0.5,size=1008"
    samples = [sample("split", burst, 9.0), sample("whole", burst, 20.0)]
    file.write_text(json.dumps({"samples": samples}))
    argv = [sys.executable, "-m", "ci.load_rates", str(file)]
    argv_of = [sys.executable, "-c", "import sys; print(sys.argv[1:])"]

    def run_at(side: str) -> Ended:
        return commands.run(*argv, side, "0.3/0.6/0.9", *argv_of)

    found = run_at("whole")
    assert found.stdout.splitlines()[1] == "['--point', 'rate=6/12/18,share=0.5,size=1008']"
    assert [point.rate for point in read_points(["rate=6/12/18,share=0.5,size=1008"])] == [
        6,
        12,
        18,
    ]
    file.write_text(json.dumps({"samples": samples[:1]}))
    assert "no burst of side 'whole'" in run_at("whole").stderr
    file.unlink()
    assert "measure the bursts first" in run_at("whole").stderr


def test_model_of_true_size_has_tokens_and_pixels_of_real_one(tmp_path: Path) -> None:
    commands.run(sys.executable, "-m", "ci.true_shapes", tmp_path, "7b")
    read = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "7b").glob("*.json")}
    text, tower = read["config"]["text_config"], read["config"]["vision_config"]
    vocabulary = read["tokenizer"]["model"]["vocab"].values()
    assert (len(vocabulary), max(vocabulary) + 1) == (152064, 152064) == (text["vocab_size"],) * 2
    assert tower["out_hidden_size"] == text["hidden_size"] == 3584
    assert read["preprocessor_config"]["max_pixels"] >= 1008 * 1008
    per_layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * text["intermediate_size"]
    assert round(text["num_hidden_layers"] * per_layer / 1e9, 1) == 6.5


@pytest.mark.parametrize("size", ["3b", "7b", "cpu"])
def test_rotary_sections_of_model_of_true_size_are_half_of_head(tmp_path: Path, size: str) -> None:
    true_shapes.write(tmp_path, size)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    head = text["hidden_size"] / text["num_attention_heads"]
    assert sum(text["rope_scaling"]["mrope_section"]) * 2 == head
