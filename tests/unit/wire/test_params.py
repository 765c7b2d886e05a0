from __future__ import annotations

import json

from epd_portable.wire.params import (
    EncodeParams,
    EncodeTransfer,
    ExpectedTransfer,
    ItemOutcome,
    PrefillOutcome,
    PrefillParams,
    read_params,
    to_params,
)

ENCODE = EncodeParams(
    transfers=(EncodeTransfer(transfer_id="t", item_uuid="h", consumer="tcp://x"),)
)
PREFILL = PrefillParams(
    transfers=(ExpectedTransfer(transfer_id="t", item_uuid="h", encoder="encode-0"),), reply_to="me"
)


def test_params_survive_json() -> None:
    assert read_params(json.loads(json.dumps(to_params(ENCODE))), EncodeParams) == ENCODE
    assert read_params(json.loads(json.dumps(to_params(PREFILL))), PrefillParams) == PREFILL


def test_an_outcome_names_only_what_is_known() -> None:
    item = ItemOutcome(mm_hash="h", source="local")
    params = to_params(PrefillOutcome(instance="pd-0", items=(item,), mm_inputs_total=1))
    assert json.loads(json.dumps(params)) == {
        "instance": "pd-0",
        "items": [{"mm_hash": "h", "source": "local"}],
        "mm_inputs_done": 0,
        "mm_inputs_total": 1,
    }
