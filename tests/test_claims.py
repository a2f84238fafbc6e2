"""Statements that README and docs make, each with the test or the figure behind it.

A statement that is reworded, or whose test is renamed, is found here; then look whether it is
still true. Figures are rows of docs/benchmarks.md, which names the command of each.
"""

import re
from pathlib import Path

import pytest

from headwater.device.families import SERVED

ROOT = Path(__file__).parents[1]

FIGURE = "figure: "
"""Marks a claim whose figure is a row of docs/benchmarks.md."""

CLAIMS = [
    # README
    (
        "README.md",
        "A block can be found only after its KV is written",
        "disagg/test_publishing.py::test_a_block_is_not_matchable_before_it_is_written",
    ),
    (
        "README.md",
        "blocks from storage or peers are verified first",
        "storage/test_damage.py::test_damage_is_a_miss_with_a_reason_and_can_be_written_again",
    ),
    (
        "README.md",
        "no lock, no polling and no synchronous transfer",
        "engine/test_loads.py::test_while_a_load_is_in_flight_others_run_and_nothing_is_held",
    ),
    (
        "README.md",
        "each miss has a reason",
        "replay/test_simulator.py::test_every_token_has_a_source_and_every_miss_a_reason",
    ),
    (
        "README.md",
        "the `openai` client works with a changed `base_url`",
        "e2e/test_clients.py::test_chat_streamed_and_whole_are_the_same",
    ),
    (
        "README.md",
        "a field that is not supported is a 400",
        "server/test_refusals.py::test_every_refused_field_is_in_the_schema_and_in_the_api_reference",
    ),
    (
        "README.md",
        "`cached_tokens` in every answer",
        "e2e/test_clients.py::test_cached_tokens_are_reported",
    ),
    (
        "README.md",
        "continues streams elsewhere when an instance dies",
        "router/test_streams.py::test_a_broken_stream_continues_on_another_instance",
    ),
    (
        "README.md",
        "restarts what dies",
        "test_up.py::test_a_killed_instance_comes_back_and_the_cluster_can_be_steered",
    ),
    (
        "README.md",
        "preemption that resumes from the cache",
        "engine/test_tiers.py::test_preemption_saves_and_resumes_from_the_host",
    ),
    (
        "README.md",
        "other models are refused with the reason",
        "test_check.py::test_a_refused_model_is_exit_code_1_with_the_reason",
    ),
    (
        "README.md",
        "survives a restart,",
        "e2e/test_tiers.py::test_a_restarted_server_hits_on_its_first_request",
    ),
    (
        "README.md",
        "about what one pool of their joint size would hold",
        FIGURE + "device + host, tokens found against one pool of the same size",
    ),
    (
        "README.md",
        "29 µs per request | 707 µs in the KV cache manager of vLLM 0.32",
        FIGURE + "29 against 707 µs per request",
    ),
    (
        "README.md",
        "35.3 % of blocks found on 8 instances | 11.3 % with round robin; 35.4 % in one pool",
        FIGURE + "35.31 % | 35.36 % in one pool; 11.3 % with round robin",
    ),
    (
        "README.md",
        "after 83 ms (H200, 8B model) | 1,119 ms computed by Headwater",
        FIGURE + "82.6 ms | 1,119 ms computed",
    ),
    # GPU
    (
        "docs/gpu.md",
        "Gemma-3-4B 0.64 / 0.68; Phi-4-mini 0.72 / 0.70",
        FIGURE + "0.64 / 0.68, 0.72 / 0.70, 0.79 / 0.88",
    ),
    ("docs/gpu.md", "Qwen3-30B-A3B 0.51 / 0.89", FIGURE + "0.51 / 0.89 / 0.90"),
    ("docs/gpu.md", "DeepSeek-V2-Lite 0.48 / 0.76", FIGURE + "0.48 / 0.76 / 0.68"),
    # How it works
    (
        "docs/how-it-works.md",
        "waits for it instead of computing it a second time",
        "scheduler/test_prefix_sharing.py::test_a_new_request_waits_for_the_prefix_and_then_finds_it",
    ),
    (
        "docs/how-it-works.md",
        "have no key in common",
        "cache/test_keys.py::test_salt_and_adapter_cannot_be_confused",
    ),
    (
        "docs/how-it-works.md",
        "Either side may die at any message",
        "e2e/test_disagg.py::test_a_killed_p_costs_time_and_nothing_else",
    ),
    (
        "docs/how-it-works.md",
        "A reason never tells one tenant about another tenant's prompts",
        "cache/test_match.py::test_a_reason_tells_nothing_about_another_tenant",
    ),
    # Questions
    (
        "docs/faq.md",
        "give the same tokens",
        "scheduler/test_equalities.py::test_preempted_equals_undisturbed",
    ),
    (
        "docs/faq.md",
        "After repeated failures a circuit breaker stops calls to storage",
        "storage/test_guard.py::test_calls_that_never_end_open_the_breaker",
    ),
    (
        "docs/faq.md",
        "the supervisor starts another engine",
        "e2e/test_lifecycle.py::test_every_client_gets_an_error_at_once_when_the_engine_is_killed_and_it_is_replaced",
    ),
    # Operations
    (
        "docs/tutorials/operate.md",
        "`/health` and new requests get 503 with `Retry-After`, running streams finish",
        "e2e/test_lifecycle.py::test_sigterm_drains_then_exits_0",
    ),
    (
        "docs/tutorials/operate.md",
        "A second signal stops at once",
        "e2e/test_lifecycle.py::test_a_second_signal_stops_at_once",
    ),
    (
        "docs/operations.md",
        "`storage is full and refuses writes`",
        "storage/test_guard.py::test_full_storage_opens_the_write_breaker_and_is_logged",
    ),
    (
        "docs/operations.md",
        "`the disk of the storage directory is full`",
        "storage/test_disk.py::test_the_disk_keeps_its_reserve",
    ),
    (
        "docs/quickstart.md",
        "finds the blocks that were written before it stopped",
        "e2e/test_tiers.py::test_a_restarted_server_hits_on_its_first_request",
    ),
    (
        "docs/tutorials/add-tiers.md",
        '`"storage": 1024`',
        "e2e/test_tiers.py::test_a_server_that_is_stopped_after_an_answer_has_stored_its_prompt",
    ),
    # API
    (
        "docs/api.md",
        "a fuzzer checks the server against it in the tests",
        "e2e/test_openapi.py::test_no_answer_is_undocumented",
    ),
    (
        "docs/api.md",
        "Requests for text may have unknown fields; those are ignored",
        "server/test_refusals.py::test_unknown_fields_are_ignored",
    ),
    (
        "docs/api.md",
        "An unknown field or value is a 400 that lists the valid ones; nothing is done then",
        "server/test_admin.py::test_control_endpoints_refuse_unknown_fields_and_list_the_valid_ones",
    ),
    (
        "docs/api.md",
        "needs `--scheduling-policy priority`, otherwise a value other than 0 is a 400",
        "server/test_refusals.py::test_a_priority_without_effect_is_refused",
    ),
    (
        "docs/api.md",
        "Joined, the pieces are byte for byte the arguments that the answer without `stream` has",
        "e2e/test_tools.py::test_streamed_calls_are_the_whole_ones",
    ),
    (
        "docs/api.md",
        "A wrong or unsupported schema, pattern or grammar is a 400 that quotes the validator",
        "e2e/test_tools.py::test_a_schema_that_is_not_supported_is_a_400",
    ),
    (
        "docs/api.md",
        "`previous_response_id` continues it",
        "e2e/test_responses.py::test_a_stored_conversation_continues_and_finds_its_prefix",
    ),
    (
        "docs/api.md",
        "Behind a router the id leads to the instance that has it",
        "router/test_constrained.py::test_a_stored_response_leads_to_its_instance",
    ),
    (
        "docs/agents.md",
        "`/v1/messages` leaves that block out",
        "server/test_session.py::test_anthropics_blocks_become_messages",
    ),
    (
        "docs/agents.md",
        "finds at least 98 % of every turn's prompt before the new message",
        "e2e/test_agent_loop.py::test_chat_completions",
    ),
    (
        "docs/agents.md",
        "are tested unmodified",
        "e2e/test_agents.py::test_a_client_completes_its_tool_loop",
    ),
    # Operating one server
    (
        "docs/operations.md",
        "so a reload loses nothing",
        "e2e/test_dashboard.py::test_a_reload_shows_the_same_history",
    ),
    (
        "docs/operations.md",
        "after it the engine is declared dead",
        "e2e/test_lifecycle.py::test_every_client_gets_an_error_for_a_device_step_that_never_ends_and_the_engine_is_replaced",
    ),
    (
        "docs/operations.md",
        "Every worker answers for all",
        "e2e/test_workers.py::test_counts_are_one_answer_and_survive_a_worker",
    ),
    (
        "docs/operations.md",
        "The next engine finds the host tier of the one before",
        "e2e/test_restart.py::test_a_killed_engine_leaves_its_host_tier_to_the_next",
    ),
    (
        "docs/operations.md",
        "running requests keep theirs and generate the same tokens",
        "e2e/test_control.py::test_reset_under_load_changes_no_token",
    ),
    (
        "docs/operations.md",
        "with unchanged files the cache stays",
        "e2e/test_control.py::test_a_refused_reload_changes_nothing",
    ),
    (
        "docs/operations.md",
        "those that wait meanwhile are served with the new weights",
        "e2e/test_control.py::test_other_weights_under_load_serve_everyone_and_mix_nothing",
    ),
    (
        "docs/operations.md",
        "without a failed request: start a new instance",
        "router/test_live.py::test_instances_are_upgraded_one_after_the_other_under_load",
    ),
    (
        "docs/operations.md",
        "the same request to another router continues with the same cache",
        "router/test_live.py::test_a_router_can_be_killed_and_clients_go_on_at_the_other",
    ),
    (
        "docs/operations.md",
        "files in storage hold whole blocks only",
        "storage/test_processes.py::test_a_writer_may_be_killed_in_the_middle_of_any_write",
    ),
    (
        "docs/migrating.md",
        "Running requests continue; `/v1/abort_requests` aborts them",
        "e2e/test_control.py::test_abort_ends_one_request_and_leaves_the_others",
    ),
    (
        "docs/faq.md",
        "`HF_HUB_OFFLINE=1` prevents that",
        "launch/test_hub.py::test_offline_and_not_cached_says_what_to_do",
    ),
    (
        "docs/quickstart.md",
        "downloaded once",
        "launch/test_hub.py::test_a_name_is_downloaded_once_and_then_found_offline",
    ),
    (
        "docs/quickstart.md",
        "Ctrl-C ends the running prompts, and the same `LLM` accepts the next ones",
        "engine/test_llm.py::test_ctrl_c_inside_any_step_leaves_nothing_behind",
    ),
    # Clusters
    (
        "docs/cluster.md",
        "A router keeps its port",
        "cluster/test_supervisor.py::test_a_router_that_is_started_again_keeps_its_port",
    ),
    (
        "docs/cluster.md",
        "a wrong flag is not retried",
        "cluster/test_supervisor.py::test_a_process_that_dies_before_it_was_ready_ends_the_start",
    ),
    (
        "docs/cluster.md",
        "instances finish their requests, then routers end",
        "cluster/test_supervisor.py::test_down_stops_instances_before_routers",
    ),
    (
        "docs/cluster.md",
        "stays down until `restart NAME`",
        "cluster/test_supervisor.py::test_a_drained_instance_stays_down",
    ),
    (
        "docs/cluster.md",
        "is an error that names it, before anything is started",
        "cluster/test_spec.py::test_mistakes_name_the_field",
    ),
    (
        "docs/cluster.md",
        "with several it is refused and lists them",
        "test_up.py::test_a_command_without_a_name_means_the_only_cluster_that_runs",
    ),
    (
        "docs/cluster.md",
        "Others do not wait for it",
        "cluster/test_supervisor.py::test_an_instance_without_a_node_does_not_hold_the_others",
    ),
    (
        "docs/cluster.md",
        "An instance keeps its group",
        "cluster/test_supervisor.py::test_a_place_is_kept_until_the_process_is_not_started_again",
    ),
    (
        "docs/cluster.md",
        "serving is untouched; then instances that died meanwhile start again",
        "cluster/test_ray_head.py::test_a_head_with_redis_is_replaced_under_load",
    ),
    (
        "docs/cluster.md",
        "Children watch a pipe of their parent",
        "security/test_processes_and_files.py::test_a_child_ends_when_its_parent_is_killed",
    ),
    (
        "docs/tutorials/disaggregate.md",
        "the other instance finds it in the storage",
        "storage/test_processes.py::test_processes_find_each_others_blocks",
    ),
    (
        "docs/tutorials/disaggregate.md",
        "prompts with little to compute stay on the decode instance",
        "router/test_policies.py::test_a_short_rest_is_prefilled_where_it_is_decoded",
    ),
    # Security
    (
        "docs/security.md",
        "A router does not start without a peer token",
        "security/test_cluster_membership.py::test_a_router_without_a_secret_does_not_start",
    ),
    (
        "docs/security.md",
        "The peer token itself is not sent",
        "security/test_cluster_membership.py::test_the_secret_does_not_travel",
    ),
    (
        "docs/security.md",
        "and for two minutes",
        "security/test_cluster_membership.py::test_an_old_signature_is_worthless",
    ),
    (
        "docs/security.md",
        "A signature is valid once",
        "security/test_cluster_membership.py::test_the_secret_does_not_travel",
    ),
    (
        "docs/security.md",
        "No GET changes anything",
        "security/test_paths_and_origins.py::test_a_get_changes_nothing",
    ),
    (
        "docs/security.md",
        "It must not be writable by other users",
        "security/test_keys.py::test_a_file_that_others_can_change_is_refused",
    ),
    (
        "docs/security.md",
        "The file is read again when it changes",
        "security/test_keys.py::test_the_file_is_read_again_when_it_changes",
    ),
    (
        "docs/security.md",
        "a consumer without the peer token gets nothing",
        "security/test_kv_events.py::test_a_listener_without_the_secret_gets_nothing",
    ),
    (
        "docs/tutorials/secure.md",
        "other tenants only to a key with the scope `admin`",
        "security/test_keys.py::test_requests_of_other_tenants_are_the_admins_business",
    ),
    # Measuring, sizing, storage and plug-ins
    (
        "docs/tutorials/measure.md",
        "no text, token or name",
        "replay/test_recordings.py::test_nothing_of_the_content_is_in_a_recording",
    ),
    (
        "docs/replay.md",
        "Only `wall_s` differs from run to run",
        "replay/test_replay_command.py::test_json_has_what_is_promised_and_is_the_same_each_time",
    ),
    (
        "docs/sizing.md",
        "More than 512 combinations are refused",
        "replay/test_plan.py::test_a_grid_tries_every_combination_that_makes_sense",
    ),
    (
        "docs/tutorials/storage-backend.md",
        "Any other exception, and any wrong answer, is counted and treated as a miss",
        "storage/test_guard.py::test_a_wrong_answer_is_a_counted_failure",
    ),
    (
        "docs/plugins.md",
        "A plug-in refuses versions of its engine that it was not tested with",
        "plugins/test_versions.py::test_a_plugin_refuses_an_untested_version_at_its_start",
    ),
    (
        "docs/plugins.md",
        "prefixes that several prompts share, then blocks that were used most often, then short prompts before long ones",
        "plugins/test_write_order.py::test_shared_prefixes_come_first_then_the_most_used_then_short_prompts_from_their_start",
    ),
]


def words_of(path: Path) -> str:
    """The text of a page without line breaks and emphasis."""
    text = re.sub(r"[*│]", "", path.read_text(encoding="utf-8"))
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(("page", "claim", "proof"), CLAIMS, ids=lambda text: text[:40])
def test_every_claim_of_a_page_has_its_proof(page, claim, proof):
    """The page has the claim in these words, and the test or figure behind it exists."""
    assert claim in words_of(ROOT / page)
    if proof.startswith(FIGURE):
        assert proof.removeprefix(FIGURE) in words_of(ROOT / "docs" / "benchmarks.md")
    else:
        file, _, name = proof.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_the_number_of_model_families_is_the_real_one():
    """README and FAQ state the number of served families."""
    for page in ("README.md", "docs/faq.md"):
        assert f"{len(SERVED)} families" in words_of(ROOT / page)


@pytest.mark.parametrize(
    "wrong",
    [
        "openai client works unchanged",
        "never the same prefix twice",
        "which a restarted server finds again",
        "after three in a row it is not asked",
    ],
)
def test_statements_that_are_too_strong_are_in_no_page(wrong):
    """A user tried these statements, and they did not hold."""
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        assert wrong not in words_of(page).lower(), page
