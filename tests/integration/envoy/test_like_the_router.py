"""What holds for the router holds with Envoy in front: the router's own tests, with Envoy.

Those of what passes through Envoy; `test_decisions` has those of who gets it.
"""

# ruff: noqa: F401 - pytest collects what is imported.
from __future__ import annotations

from tests.integration.router.test_access import (
    test_health_tells_names_to_holders_of_the_secret_only,
    test_instances_are_shown_the_token_and_no_other_headers,
    test_only_clients_with_a_key_are_served,
    test_pages_of_other_origins_ask_where_that_is_allowed,
    test_what_became_of_items_is_told_to_those_who_may_know,
)
from tests.integration.router.test_admission import (
    test_beyond_the_queue_is_429_with_retry_after_and_the_key,
    test_priority_overtakes_by_header_and_by_field,
)
from tests.integration.router.test_failures import (
    test_a_client_that_leaves_a_stream_ends_it_at_the_instance,
    test_a_request_is_not_sent_to_every_pd_instance_in_turn,
    test_a_silent_pd_instance_does_not_hang_the_client,
    test_other_refusals_do_not_hide_the_instances_own_error,
    test_without_a_pd_instance_clients_are_told_to_come_again,
)
from tests.integration.router.test_faults import test_a_body_that_does_not_come_is_refused_in_time
from tests.integration.router.test_items_of_a_request import (
    test_a_request_is_answered_without_an_item_that_cannot_be_had_and_says_so,
)
from tests.integration.router.test_not_wanted import (
    build_connected,
    test_a_client_that_leaves_before_the_instance_was_asked_wants_its_items_no_more,
    test_a_client_that_leaves_wants_its_items_no_more,
    test_what_is_sent_again_by_other_transfers_is_not_wanted_by_the_first,
)
from tests.integration.router.test_requests import (
    test_a_large_image_arrives_unchanged,
    test_encode_jobs_and_pd_request_run_at_the_same_time,
    test_text_reaches_the_pd_instance_unchanged_and_no_encoder,
    test_unknown_paths_and_methods_are_answered_in_json,
)
from tests.integration.router.test_streams import test_an_answer_passes_as_it_comes
