"""Errors that users see: listed once, in plain words."""

import re

import pytest

from tests.error_list import PAGE, collect, page

RIDDLES = re.compile(
    r"\b(nobody|somebody|whoever|whom|whose|anybody|said|lately|told|is none)\b", re.IGNORECASE
)


def test_the_page_lists_every_error():
    """`python -m tests.error_list` writes the page."""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("error", collect(), ids=lambda e: f"{e.module}: {e.message[:40]}")
def test_a_message_is_a_plain_sentence(error):
    """A message is long enough to say what happened and what to do, in plain words."""
    assert len(error.message) >= 15
    assert not RIDDLES.search(error.message)


def test_every_value_of_a_message_is_filled_in():
    """Braces with a name in a plain string are shown to the user instead of the value."""
    assert [error.message for error in collect() if re.search(r"\{\w", error.message)] == []
