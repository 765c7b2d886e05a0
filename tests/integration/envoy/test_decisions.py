"""The router decides with Envoy in front as without: its own tests, with Envoy."""

# ruff: noqa: F401 - pytest collects what is imported.
from __future__ import annotations

import pytest

from tests.integration.router.test_choice import (
    test_a_repeated_picture_meets_the_encoder_that_has_it,
    test_small_pictures_stay_where_they_are_needed,
    test_who_holds_a_key_is_told_why,
)
from tests.integration.router.test_hops import (
    test_a_cache_key_leads_items_in_place_of_their_content,
    test_a_client_is_not_heard,
    test_an_output_that_is_somewhere_is_asked_for_there,
    test_items_are_shared_out_among_the_encoders_that_are_named,
    test_kv_that_a_hop_has_goes_to_the_instance_that_answers,
    test_what_a_hop_cannot_mean_is_refused,
    test_who_is_named_gets_the_request_and_its_items,
)
from tests.integration.router.test_membership import (
    newcomers,
    test_a_router_without_instances_serves_those_that_join,
    test_one_that_leaves_finishes_its_work_and_gets_no_more,
)
from tests.integration.router.test_metadata import (
    test_the_pd_instance_is_asked_after_the_encoders_and_without_media,
)
from tests.integration.router.test_prefill import (
    test_a_client_that_leaves_ends_the_prefill,
    test_a_lost_decode_instance_is_followed_by_another_with_kv_of_its_own,
    test_a_prefill_instance_that_is_gone_costs_no_answer,
    test_a_prompt_is_computed_by_one_instance_and_answered_by_the_other,
    test_a_silent_decode_instance_is_given_up_however_long_the_prefill_took,
    test_a_silent_prefill_instance_costs_no_answer,
    test_an_item_whose_other_encoder_is_full_is_encoded_where_it_is_needed,
    test_another_prefill_instance_is_asked_and_then_the_decode_instance,
    test_items_go_to_the_prefill_instance_and_media_to_both,
    test_prompts_of_other_interfaces_are_computed_apart_too,
    test_what_a_prefill_instance_refuses_is_refused,
    test_who_holds_the_encoder_shares_the_items_of_a_request_with_others,
    test_whoever_is_not_busier_encodes_its_own_items,
    test_without_a_decode_instance_nobody_answers,
)

pytestmark = pytest.mark.full
