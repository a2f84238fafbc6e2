"""The adapter to llguidance: grammars compiled for one vocabulary, cached by content.

Compilation is bounded: the library stops with an error if a grammar needs more states, symbols
or work than the limits allow. Several threads may call this module.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from headwater.errors import RequestError

_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""These limits allow at most about 40 ms to build the lexer of a grammar and 20 ms for one
mask."""

_MAX_CACHED = 512
"""Number of compiled grammars that are kept, 50 to 80 kB each for a small schema. A grammar counts
once per group that uses it."""

_MAX_SENTENCE = 600
"""Characters of the library's error text that an error quotes."""


class GrammarCompiler:
    """Compiles grammars for the vocabulary of one model."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """`tokenizer_json` is called once, when the first grammar is compiled."""
        self.vocab_size = vocab_size
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, int], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        """Protects the two structures above. Not held while a grammar is compiled."""

    @property
    def num_cached(self) -> int:
        return len(self._compiled)

    def check(self, grammar: str) -> None:
        """Raise RequestError, with the library's error text, for a grammar that cannot be
        used."""
        self._prototype(grammar)

    def has(self, grammar: str, group: int = 0) -> bool:
        """Whether `matcher` returns at once. Never waits."""
        # Without the lock, which is held while the vocabulary is read. A lookup is atomic.
        return (grammar, group) in self._compiled

    def matcher(self, grammar: str, group: int = 0) -> LLMatcher:
        """A matcher at the beginning of `grammar`. Raises RequestError like `check`.

        Matchers of one grammar and one group share the states of its lexer, and a lock: one
        thread at a time uses them. Each thread asks for matchers of its own group.
        """
        return self._prototype(grammar, group).deep_copy()

    def _prototype(self, grammar: str, group: int = 0) -> LLMatcher:
        key = grammar, group
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        made = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=_LIMITS)
        if made.is_error():
            raise RequestError(_describe(made.get_error()))
        with self._lock:
            self._compiled[key] = made
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        return made

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    self._tokenizer_json(),
                    n_vocab=self.vocab_size,
                    eos_token=self._eos_token_ids or None,
                )
            return self._tokenizer


def to_lark(grammar: str) -> str:
    """A GBNF grammar converted to Lark syntax. A grammar in Lark syntax is returned
    unchanged."""
    try:
        return any_to_lark(grammar)
    except Exception as exc:
        raise RequestError(f"the grammar cannot be read: {str(exc)[:_MAX_SENTENCE]}") from exc


def _describe(error: str) -> str:
    return f"the grammar cannot be compiled: {' '.join(error.split())[:_MAX_SENTENCE]}"
