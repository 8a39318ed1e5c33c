"""Tell an inference engine what to warm, from the heat of a running server.

`kvcache.engine_warm` decides what to lease; here are the three things that it needs from a server:
the heat, the token sequence that a passage has in a prompt, and an engine that takes the call. A
round runs every few seconds in a thread of its own; no request ever waits for it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import structlog

from stoker.errors import StokerError
from stoker.kvcache.engine_warm import ContentKey, EngineWarmer, EngineWarmOutcome
from stoker.service.kv_replicas import SharedLeases
from stoker.service.rounds import Rounds, is_fault

log = structlog.get_logger(__name__)

TextOf = Callable[[ContentKey], str | None]
Encode = Callable[[str], Sequence[int]]

_SEQUENCES_MAX = 4_096
_TAIL_TOKENS = 64  # what an engine may lack of a sequence that it holds: its last block


class PromptTokens:
    """The token sequence of a passage as prompts begin with it: what stands before, then its text.

    Engines reuse prefixes only, so this is what they can have ready: everything up to and with the
    first passage. Kept while the documents stay the same; not thread-safe.

    Args:
        text_of: The passage's text; None where it is gone.
        encode: The engine's tokenizer.
        before: What prompts say before the first passage.
    """

    def __init__(self, text_of: TextOf, encode: Encode, *, before: str = "") -> None:
        self._text_of = text_of
        self._encode = encode
        self._before = before
        self._known: OrderedDict[ContentKey, tuple[str, Sequence[int]]] = OrderedDict()

    def __call__(self, key: ContentKey) -> Sequence[int] | None:
        """Return the tokens of a passage, or None where there is no such passage."""
        text = self._text_of(key)
        if not text:
            self._known.pop(key, None)
            return None
        known = self._known.get(key)
        if known is not None and known[0] == text:
            self._known.move_to_end(key)
            return known[1]
        tokens = self._encode(self._before + text)
        self._known[key] = (text, tokens)
        while len(self._known) > _SEQUENCES_MAX:
            self._known.popitem(last=False)
        return tokens


class EngineWarmLoop:
    """Runs rounds of an `EngineWarmer` in a thread until closed; closing gives all leases back.

    Args:
        warmer: What to lease, and how fast.
        heat: Weight per content key.
        tokens_of: As in `EngineWarmer.warm`.
        generation: The documents' generation: another one ends every lease of the last.
        held: Returns how many leading tokens the engine holds already; those sequences are not
            asked for. None where the engine does not tell.
        leases: What other replicas hold in the same engine is left to them. None where there are
            none.
        every_s: Seconds between rounds.
    """

    def __init__(
        self,
        warmer: EngineWarmer,
        *,
        heat: Callable[[], Mapping[ContentKey, float]],
        tokens_of: Callable[[ContentKey], Sequence[int] | None],
        generation: Callable[[], int],
        held: Callable[[Sequence[int]], int] | None = None,
        leases: SharedLeases | None = None,
        every_s: float = 5.0,
    ) -> None:
        self._warmer = warmer
        self._heat = heat
        self._tokens_of = tokens_of
        self._generation = generation
        self._held = held
        self._leases = leases
        self._last: EngineWarmOutcome | None = None
        self._rounds = Rounds(
            self._round,
            name="engine-warm",
            every_s=every_s,
            failed=self._failed,
            ended=self._let_go,
        )

    def start(self) -> None:
        """Begin; the first round runs at once."""
        self._rounds.start()

    def wait_for(self, rounds: int, *, timeout_s: float) -> EngineWarmOutcome | None:
        """Wait until that many rounds are done in all; returns the last one's outcome."""
        return self._last if self._rounds.wait_for(rounds, timeout_s=timeout_s) else None

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop and give the leases back; tells whether that was done in time."""
        return self._rounds.stop(timeout_s)

    def _let_go(self) -> None:
        self._warmer.close()
        if self._leases is not None:
            with contextlib.suppress(StokerError):  # the notes end by themselves
                self._leases.note(set())

    def _round(self) -> None:
        outcome = self._warmer.warm(self._heat(), self._wanted, generation=self._generation())
        if self._leases is not None:
            self._leases.note(self._warmer.leased())
        if outcome.sent or outcome.released:
            log.info(
                "service.engine_warmed",
                sent=outcome.sent,
                renewed=outcome.renewed,
                released=outcome.released,
                rate_limited=outcome.rate_limited,
            )
        self._last = outcome

    @staticmethod
    def _failed(error: Exception, again: bool) -> None:
        log.warning("service.engine_warm_failed", reason=str(error), exc_info=is_fault(error))

    def _wanted(self, key: ContentKey) -> Sequence[int] | None:
        if self._leases is not None and self._leases.held_elsewhere(key):
            return None
        tokens = self._tokens_of(key)
        if not tokens or self._held is None:
            return tokens
        # What the engine holds to within a block needs no call; it is asked about again next time.
        return None if self._held(tokens) >= max(1, len(tokens) - _TAIL_TOKENS) else tokens
