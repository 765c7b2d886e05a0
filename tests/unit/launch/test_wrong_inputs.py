"""Wrong inputs: an answer names the key, the place where it was written, and the remedy."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from epd_benchmarks import cli as bench
from epd_portable import envs
from epd_portable.launch import cli as launch

COMMANDS = {"epd-launch": launch.main, "epd-bench": bench.main}
PLAN = "epd-launch plan --platform cpu --config t.yaml"
UP = "epd-launch --platform cpu --config t.yaml"


@pytest.fixture(autouse=True)
def pinned(tmp_path: Path) -> Iterator[None]:
    """Work in a folder."""
    with (
        contextlib.chdir(tmp_path),
        mock.patch.object(tempfile, "tempdir", str(tmp_path)),
        mock.patch.dict("os.environ"),
    ):
        for variable in envs.TABLE:
            os.environ.pop(variable.name, None)
        yield


def run(command: str, file: str = "model: demo\n", **env: str) -> Result:
    Path("t.yaml").write_text(file, "utf-8")
    program, *words = shlex.split(command)
    result = CliRunner().invoke(COMMANDS[program], words, env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 2 or (program == "epd-launch" and "secret" in words), result.output
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output and "instance of" not in result.output
    return result


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("epd-launch serve", ["No such command 'serve'"]),
        ("epd-launch instance", ["'instance'", "'instances'"]),
        (
            "epd-launch engine --platform cpu --config t.yaml",
            ["launch.join: not set", "--set launch.join=http://10.0.0.1:8000"],
        ),
        ("epd-launch plam", ["'plam'", "'plan'"]),
        ("epd-launch up --platfrom cpu", ["'--platfrom'", "'--platform'"]),
        ("epd-launch plan --config t.yaml", ["name a platform with --platform"]),
        ("epd-launch plan --platform gpu --config t.yaml", ["'--platform'", "'gpu'", "'cuda'"]),
        ("epd-launch plan --platform cpu --config nope.yaml", ["nope.yaml: no such file"]),
        ("epd-launch plan --platform cpu --config .", [".: Is a directory"]),
        (
            "epd-launch plan --platform npu --hardware nope --config t.yaml",
            ["--hardware nope", "there are 910b-32g", "the path of a file"],
        ),
        (
            "epd-launch plan --platform cuda --hardware 910b-64g --config t.yaml",
            ["910b-64g is a profile of platform npu", "is cuda; leave --platform out"],
        ),
        (f"{UP} --port 0", ["'--port'", "0"]),
        (f"{UP} --log-dir t.yaml", ["'--log-dir'", "'t.yaml'"]),
        (
            "epd-launch instances --front localhost:8000 --secret-file s",
            ["'--front'", "write http://localhost:8000"],
        ),
        (
            "epd-launch instances --front http://u:p@h --secret-file s",
            ["'http://u:***@h'", "leave out what stands before an @"],
        ),
        (
            "epd-launch instances --front http://h:1 --secret-file s",
            ["secret_file s cannot be read", "epd-launch secret s makes one"],
        ),
        ("epd-launch secret no/such/s", ["no/such/s cannot be written"]),
        ("epd-launch secret t.yaml", ["t.yaml exists", "remove it first"]),
        (f"{PLAN} store.url=redis://:p@h", ["redis://:***@h"]),
        (
            f"{PLAN} --set store.kind=redis --set store.url=redis://u:p@h",
            ["redis://u:***@h", "store.password_file"],
        ),
        (
            "epd-launch plan --platform cuda --config t.yaml "
            "--set instances.encode.env.CUDA_VISIBLE_DEVICES=\"'3'\"",
            ["instances.encode.env.CUDA_VISIBLE_DEVICES (--set ", "list devices instead"],
        ),
        (
            f"{PLAN} --set instances.prefill={{}} "
            "--set instances.decode.env.VLLM_NIXL_SIDE_CHANNEL_PORT=\"'1'\"",
            ["instances.decode.env.VLLM_NIXL_SIDE_CHANNEL_PORT (--set ", "remove it"],
        ),
        (
            f"{PLAN} --set 'instances={{prefill: {{}}, decode: {{}}}}' "
            "--set engine_args.kv_transfer_config={}",
            ["engine_args.kv_transfer_config (--set ", "its settings are under transfer"],
        ),
        ("epd-bench transfer --bytes 1GB", ["'--bytes'", "did you mean 1GiB?"]),
    ],
)
def test_a_wrong_command_line_is_answered_with_what_to_write(
    command: str, named: list[str]
) -> None:
    text = run(command).output
    assert [words for words in named if words not in text] == []


@pytest.mark.parametrize(
    ("assignment", "remedy"),
    [
        ("model=", "got nothing"),
        ("front.port=eighty", "got 'eighty'"),
        ("front.host=''", "at least 1 character"),
        ("front.prot=3", "unknown key; did you mean port?"),
        ("front=8000", "expected a mapping of host, port, tls_cert_file,"),
        ("transfer.pool_bytes=1GB", "did you mean 1GiB?"),
        ("transfer.pool_bytes=-1MiB", "write bytes or a unit, as in 512MiB or 1GiB"),
        ("transfer.wait_timeout_s=30s", "write 30"),
        ("transfer.wait_timeout_s=5 min", "write 300"),
        ("transfer.wait_timeout_s=soon", "write a number, as in 30"),
        ("front.drain_s=.inf", "should be a finite number"),
        (
            "transfer.path=rdma",
            "input should be 'auto', 'ipc', 'shm', 'nixl', 'collective' or 'tcp', got 'rdma'",
        ),
        ("transfer.path=ipc", "write auto or shm"),
        ("instances.encode=3", "expected a mapping of count, tensor_parallel_size,"),
        ("instances.encode.env.A=1", 'put it in quotes, as "1"'),
        ("instances.encode.devices=[0]", "has no use for it; move it under platform.<name>"),
        ("env.TMPDIR=/x", "TMPDIR is set by the launcher; remove it"),
        ("env.EPD_LOG_LEVEL=loud", "expected DEBUG, INFO, WARNING or ERROR"),
        ("env.A-B=x", "has not the form that it needs"),
        ("engine_args.max-model-len=3", "write max_model_len"),
        ("engine_args.port=3", "the public one is front.port"),
        ("engine_args.api_server_count=-3", "-3 API servers of the front: write 1 to 64"),
        ("engine_args.api_server_count=many", "'many' API servers of the front: write 1 to 64"),
        ("engine_args.enable_tower_connector_lora=true", "adapters of encoders cannot be loaded"),
        ("engine_args=[]", "expected a mapping of keys and values, got a list"),
        ("launch.host=0.0.0.0", "write the one that others reach this machine by"),
        ("launch.host=10.0.0.1", "set secret_file"),
        ("launch.first_port=65535", "65535 is the highest; lower it"),
        ("front.tracing.endpoint=collector:4318", "write http://collector:4318"),
        ("front.media.urls.allowed_networks=[10.0.0.1/8]", "write for example 10.1.0.0/16"),
        ("model=no such", "give an existing folder"),
    ],
)
def test_wrong_value_is_reported_with_key_place_and_remedy(assignment: str, remedy: str) -> None:
    text = run(f"{PLAN} --set {shlex.quote(assignment)}").output
    assert f"{assignment.partition('=')[0]} (--set {assignment})" in text
    assert remedy in text


@pytest.mark.parametrize(
    ("assignment", "section", "remedy"),
    [
        ("front.tls_cert_file=a.pem", "front", "set both or neither"),
        ("store.kind=redis", "store", "url is missing"),
        ("instances.encoder.count=1", "instances.encoder", "did you mean encode?"),
        ("instances.encode.tensor_parallel_size=2", "instances.encode", "raise its count instead"),
        ("instances.decode.count=1", "instances", "name prefill or encode_prefill"),
    ],
)
def test_conflicting_values_are_reported_by_their_section(
    assignment: str, section: str, remedy: str
) -> None:
    text = run(f"{PLAN} --set {assignment}").output
    assert f"{section} (--set {assignment}): " in text
    assert remedy in text


def test_an_assignment_that_is_none_or_of_an_overlay_is_answered() -> None:
    assert "--set 'foo': write it as key.subkey=value" in run(f"{PLAN} --set foo").output
    text = run(f"{PLAN} --set platform.cpu.engine_args.dtype=float16").output
    assert "leave out platform.NAME" in text


@pytest.mark.parametrize(
    ("file", "lines"),
    [
        ("", ["the file must hold a mapping of keys and values at its top"]),
        ("- a\n", ["the file must hold a mapping of keys and values at its top"]),
        ("model: [\n", ["not valid YAML: line 2, column 1"]),
        (
            "model: demo\nplatform: {tpu: {}}\n",
            ["platform.tpu (line 2): unknown platform; known are cuda, npu, cpu"],
        ),
        (
            "model: demo\nplatform: {cuda: 3}\n",
            ["platform.cuda (line 2): expected a mapping of top-level keys"],
        ),
        (
            "model: demo\ntransfer: {pool_bytes: 2 GB}\n"
            "platform:\n  npu: {transfer: {path: shm}, routr: {}}\n",
            [
                "2 problems",
                "transfer.pool_bytes (line 2): '2 GB' is not a size",
                "platform.npu.routr (line 4): unknown key; did you mean front?",
            ],
        ),
        (
            "front: {prot: 1}\ninstances: {encoder: {}}\nsecret_file: nope\nenv: {TMPDIR: x}\n"
            "launch: {warm_up: true}\n"
            "model: demo\nmodel: x\n",
            [
                "6 problems",
                "front.prot (line 1): unknown key; did you mean port?",
                "instances.encoder (line 2): unknown key; did you mean encode?",
                "secret_file (line 3): cannot be read: No such file or directory",
                "env.TMPDIR (line 4): TMPDIR is set by the launcher; remove it",
                "launch.warm_up (line 5): unknown key; known are host, join",
                "line 7: model is written twice; keep one",
            ],
        ),
        (
            "model: demo\nenv:\n  EPD_LOG_LEVEL: loud\n",
            ["env.EPD_LOG_LEVEL (line 3)", "expected DEBUG"],
        ),
    ],
)
def test_every_problem_of_a_file_is_listed_with_its_line(file: str, lines: list[str]) -> None:
    text = run(UP, file).output
    places = [text.find(line) for line in lines]
    assert -1 not in places, text
    assert places == sorted(places)


def test_missing_or_readable_files_are_listed() -> None:
    for name, content in (("s", "x" * 40), ("k", "key\n")):
        Path(name).write_text(content)
        Path(name).chmod(0o644)
    file = (
        "model: demo\nsecret_file: s\n"
        "front: {api_keys_file: k, tls_cert_file: c, tls_key_file: c, access_log: no/x}\n"
        "instances: {encode: {environment: nowhere}}\n"
    )
    text = run(UP, file).output
    assert "secret_file (line 2): has mode 0644" in text and "chmod 600 s" in text
    assert "front.tls_cert_file (line 3): c cannot be used" in text
    assert "front.access_log (line 3): " in text and "/no cannot be used: No such file" in text
    assert "instances.encode.environment (line 4): " in text and "nowhere/bin/python cannot" in text
    assert "front.api_keys_file (line 3): k has mode 0644" in text and "chmod 600 k" in text


def test_missing_resources_are_listed_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        alone = run(f"{UP} --port {port}").output
        assert f"front.port {port} on 127.0.0.1 is in use" in alone
        both = run(f"{UP} --port {port} --set transfer.pool_bytes=9000TiB").output
    assert "2 problems of this machine" in both
    assert "transfer.pool_bytes: " in both and "docker run --shm-size" in both


def test_wrong_variables_are_answered_by_name() -> None:
    assert "EPD_LOG_LEVEL='loud': expected DEBUG" in run(PLAN, EPD_LOG_LEVEL="loud").output
    assert "'gpu'" in run("epd-launch plan --config t.yaml", EPD_PLATFORM="gpu").output
