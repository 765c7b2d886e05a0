"""Clients that are commands: benchmarks, which make their pictures themselves, and curl."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from epd_portable.demo import MODEL_DIR
from tests.clients.conftest import MODEL, Encodes, question, run, seen_in

REQUESTS = 6
SCRIPTS = Path(sys.executable).parent
# `vllm bench serve`, whose own entry point asks for a package named vllm.
VLLM_BENCH = """
from epd_portable.platforms.torchvision_guard import install
install()
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def test_vllm_bench_serve(url: str, encodes: Encodes, tmp_path: Path) -> None:
    with encodes(REQUESTS):
        run(
            os.environ["EPD_CLIENTS_ENGINE_PYTHON"],
            *("-c", VLLM_BENCH, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
            *("--base-url", url, "--model", MODEL, "--tokenizer", MODEL_DIR),
            *("--dataset-name", "random-mm", "--num-prompts", str(REQUESTS)),
            *("--random-input-len", "16", "--random-output-len", "8", "--ignore-eos"),
            *("--random-mm-base-items-per-request", "1"),
            *("--random-mm-limit-mm-per-prompt", '{"image": 1, "video": 0}'),
            *("--random-mm-bucket-config", "{(112, 112, 1): 1.0}"),
            *("--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"),
        )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == 8 * REQUESTS


def test_aiperf(url: str, encodes: Encodes, tmp_path: Path) -> None:
    # Offline it reads tokenizers from the cache only, never from a folder.
    cache = tmp_path / "cache"
    repository = cache / "models--local--demo"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / revision).symlink_to(MODEL_DIR)
    with encodes(REQUESTS):
        run(
            SCRIPTS / "aiperf",
            *("profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", "local/demo", "--request-count", str(REQUESTS), "--concurrency", "2"),
            *("--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "8"),
            *("--image-width-mean", "112", "--image-height-mean", "112"),
            *("--extra-inputs", "ignore_eos:true", "--ui", "none"),
            *("--output-artifact-dir", tmp_path),
            HF_HUB_CACHE=str(cache),
        )
    result = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert result["request_count"]["avg"] == REQUESTS
    assert result["error_summary"] == []
    assert result["time_to_first_token"]["avg"] > 0


def test_guidellm(url: str, encodes: Encodes, tmp_path: Path) -> None:
    with encodes(REQUESTS):
        run(
            SCRIPTS / "guidellm",
            *("run", "--backend", f"kind=openai_http,target={url},model={MODEL}"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", "kind=synthetic_image,width=112,height=112,output_tokens=8"),
            *("--tokenizer", f"kind=huggingface_auto,model={MODEL_DIR}"),
            *("--output", f"kind=json,path={tmp_path / 'result.json'}"),
            "--disable-console",
        )
    result = json.loads((tmp_path / "result.json").read_text())
    [benchmark] = result["benchmarks"]
    counted = benchmark["metrics"]["request_totals"]
    assert (counted["successful"], counted["errored"]) == (REQUESTS, 0)


@pytest.mark.parametrize(
    "way",
    [
        ("--header", "Expect: 100-continue"),
        ("--header", "Transfer-Encoding: chunked"),
        ("--header", "Transfer-Encoding: chunked", "--header", "Expect: 100-continue"),
        ("--http1.0",),
        ("--compressed", "--header", "Content-Type: application/json; charset=utf-8"),
    ],
    ids=["asks first", "chunked", "chunked, asks first", "HTTP 1.0", "compressed"],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_curl(
    v1: str, encodes: Encodes, tmp_path: Path, way: tuple[str, ...], streamed: bool
) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": question(80), "stream": streamed}
    body |= {"temperature": 0, "max_tokens": 24}
    (tmp_path / "body.json").write_text(json.dumps(body))
    with encodes(1):
        answer = run(
            *("curl", "--silent", "--show-error", "--fail-with-body", "--no-buffer"),
            *("--noproxy", "*", "--header", "Content-Type: application/json", *way),
            *("--data-binary", f"@{tmp_path / 'body.json'}", f"{v1}/chat/completions"),
        )
    if not streamed:
        assert json.loads(answer)["choices"][0]["message"]["content"] == seen_in(80)
        return
    *events, last = [line.removeprefix("data: ") for line in answer.split("\n") if line]
    assert last == "[DONE]"
    choices = [json.loads(event)["choices"] for event in events]
    assert "".join(c[0]["delta"].get("content") or "" for c in choices if c) == seen_in(80)
