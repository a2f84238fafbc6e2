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
        "fields that are not built are a 400",
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
        "57 µs per request | 1,196 µs in the KV cache manager of vLLM 0.32",
        FIGURE + "57 against 1,196 µs per request",
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
]


def words_of(path: Path) -> str:
    """The text of a page without line breaks and emphasis."""
    text = re.sub(r"[*│]", "", path.read_text(encoding="utf-8"))
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(("page", "claim", "proof"), CLAIMS, ids=lambda text: text[:40])
def test_every_claim_of_a_page_has_its_proof(page, claim, proof):
    """The page says it in these words, and its test or figure exists."""
    assert claim in words_of(ROOT / page)
    if proof.startswith(FIGURE):
        assert proof.removeprefix(FIGURE) in words_of(ROOT / "docs" / "benchmarks.md")
    else:
        file, _, name = proof.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_the_number_of_model_families_is_the_real_one():
    """README and FAQ state it."""
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
    """They were tried by a user and did not hold."""
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        assert wrong not in words_of(page).lower(), page
