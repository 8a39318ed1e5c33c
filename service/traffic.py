"""Made-up users with real questions: sessions that walk between topics, skewed and drifting.

The questions are written by hand (`questions.json`), grouped by topic, each topic linked to related
ones. A session starts at a popular topic, asks, follows up in other words, asks on within the topic
or goes to a related one. Popularity is Zipf over topics and over a topic's questions, and drifts:
topics rise to the top and sink. Everything follows from the seed.

A few hundred questions are too few distinct queries for a measurement, so each query's vector is
its wording's embedding, moved towards the session's previous question (as a search rewritten in
context is) and by a little noise. What the demo prints says so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.events import RESULT_USED, SEARCH_PERFORMED, Event, new_event

QUESTIONS_PATH = Path(__file__).with_name("questions.json")
_WORDINGS = ("{0}", "Show me an example. {0}")
WORDING_COUNT = len(_WORDINGS)


@dataclasses.dataclass(frozen=True, slots=True)
class Topic:
    """Questions about one subject, and the places of related topics."""

    name: str
    questions: tuple[str, ...]
    related: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TrafficSettings:
    """The shape of the traffic. Shares are probabilities.

    Attributes:
        zipf_topics: Exponent over topics; 1.0 is the classic, measured for web and FAQ traffic.
        zipf_questions: Exponent over the questions of a topic.
        session_searches_mean: Mean searches of a session (geometric).
        follow_share: The same question in other words.
        related_share: On to a related topic; what is left stays in the topic.
        drift_sessions: Every so many sessions one topic rises to the top ranks.
        drift_ranks: How high it rises, at least.
        context_share_max: How far a vector moves towards the session's previous question, at most.
        noise: Length of the random part, beside a wording's unit length.
        span_s: Seconds between the first and the last search of one window of traffic.
        tenant: Whose traffic it is.
    """

    zipf_topics: float = 1.0
    zipf_questions: float = 0.8
    session_searches_mean: float = 4.0
    follow_share: float = 0.25
    related_share: float = 0.35
    drift_sessions: int = 50
    drift_ranks: int = 5
    context_share_max: float = 0.3
    noise: float = 0.15
    span_s: float = 3_600.0
    tenant: str = "default"


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """One search of one session.

    Attributes:
        place: Position in the whole traffic, from 0.
        wording: Row of the wording in `Questions.texts`.
        context: Row of the session's previous wording; its own where it is the first.
    """

    place: int
    session: str
    topic: int
    wording: int
    context: int


class Questions:
    """The hand-written questions, with their wordings in one flat list.

    Raises:
        InputError: the file is not what is described above; names the topic.
    """

    def __init__(self, path: Path = QUESTIONS_PATH) -> None:
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))["topics"]
            places = {topic["name"]: place for place, topic in enumerate(raw)}
            self.topics = tuple(
                Topic(
                    topic["name"],
                    tuple(topic["questions"]),
                    tuple(places[name] for name in topic["related"]),
                )
                for topic in raw
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a file of questions: {error!r}") from error
        if not self.topics or not all(topic.questions for topic in self.topics):
            raise InputError(f"{path}: a topic has no questions")
        starts = np.cumsum([0, *(len(topic.questions) for topic in self.topics)])
        self._starts = starts.tolist()
        self.count = int(starts[-1])

    @property
    def texts(self) -> list[str]:
        """Every wording of every question: row = question × `WORDING_COUNT` + wording."""
        return [
            wording.format(question)
            for topic in self.topics
            for question in topic.questions
            for wording in _WORDINGS
        ]

    def row(self, topic: int, question: int, wording: int) -> int:
        """Return the row in `texts` of one wording of one question of a topic."""
        return (int(self._starts[topic]) + question) * WORDING_COUNT + wording


class Traffic:
    """An endless, seeded stream of visits; two objects with one seed give the same.

    Drawing on continues where it stopped, so a window drawn later is the next traffic of the same
    users: unseen, and drifted.
    """

    def __init__(
        self, questions: Questions, *, seed: int, settings: TrafficSettings | None = None
    ) -> None:
        self._questions = questions
        self.settings = settings or TrafficSettings()
        self._rng = np.random.default_rng(seed)
        self._noise_seed = seed
        self._ranked = self._rng.permutation(len(questions.topics)).tolist()
        self._orders = [self._rng.permutation(len(t.questions)) for t in questions.topics]
        self._place = 0
        self._session_count = 0
        self._pending: list[Visit] = []

    def draw(self, count: int) -> list[Visit]:
        """Return the next ``count`` visits. Sessions overlap in time as visits of few users do."""
        while len(self._pending) < count:
            self._pending.extend(self._interleaved())
        taken, self._pending = self._pending[:count], self._pending[count:]
        numbered = [
            dataclasses.replace(visit, place=self._place + step) for step, visit in enumerate(taken)
        ]
        self._place += count
        return numbered

    def _interleaved(self, together: int = 8) -> Iterator[Visit]:
        sessions = [list(self._session()) for _ in range(together)]
        while sessions:
            turn = int(self._rng.integers(len(sessions)))
            yield sessions[turn].pop(0)
            if not sessions[turn]:
                sessions.pop(turn)

    def _session(self) -> Iterator[Visit]:
        settings = self.settings
        self._session_count += 1
        if self._session_count % settings.drift_sessions == 0:
            self._drift()
        name = f"session-{self._session_count}"
        topic = self._ranked[self._zipf(len(self._ranked), settings.zipf_topics)]
        question, wording, context = self._question(topic), 0, -1
        for _ in range(int(self._rng.geometric(1.0 / settings.session_searches_mean))):
            row = self._questions.row(topic, question, wording)
            yield Visit(0, name, topic, row, row if context < 0 else context)
            context = row
            turn = self._rng.random()
            if turn < settings.follow_share:
                wording = (wording + 1 + int(self._rng.integers(WORDING_COUNT - 1))) % WORDING_COUNT
                continue
            related = self._questions.topics[topic].related
            if turn < settings.follow_share + settings.related_share and related:
                topic = related[int(self._rng.integers(len(related)))]
            question, wording = self._question(topic), 0

    def _question(self, topic: int) -> int:
        order = self._orders[topic]
        return int(order[self._zipf(len(order), self.settings.zipf_questions)])

    def _zipf(self, count: int, exponent: float) -> int:
        weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
        return int(self._rng.choice(count, p=weights / weights.sum()))

    def _drift(self) -> None:
        rising = self._ranked.pop(int(self._rng.integers(len(self._ranked))))
        self._ranked.insert(int(self._rng.integers(self.settings.drift_ranks)), rising)

    def vectors(
        self, visits: Sequence[Visit], wordings: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return one query vector per visit.

        Args:
            wordings: float32, shape (rows of `Questions.texts`, dim), unit length.

        Returns:
            float32, shape (len(visits), dim), unit length; a visit's vector depends on the seed
            and its place only.
        """
        dim = wordings.shape[1]
        out = np.empty((len(visits), dim), dtype=np.float32)
        for step, visit in enumerate(visits):
            rng = np.random.default_rng((self._noise_seed, visit.place))
            share = rng.random() * self.settings.context_share_max
            noise = rng.normal(size=dim) * (self.settings.noise / np.sqrt(dim))
            moved = wordings[visit.wording] * (1 - share) + wordings[visit.context] * share
            vector = moved / np.linalg.norm(moved) + noise
            out[step] = vector / np.linalg.norm(vector)
        return out

    def events(
        self,
        visit: Visit,
        chunk_ids: Sequence[str],
        *,
        text: str,
        start_s: float,
        window: int,
        run: str = "traffic",
    ) -> list[Event]:
        """Return what one search leaves behind: the search, and the result that was used, if any.

        A user reads from the top and takes each result with a falling chance (a cascade).

        Args:
            chunk_ids: What the search found, best first.
            text: The question as asked.
            start_s: Unix seconds of place 0.
            window: Visits that `TrafficSettings.span_s` is divided among.
            run: Begins every event's id; a log counts an id once.
        """
        settings = self.settings
        time_s = start_s + visit.place * settings.span_s / max(window, 1)
        found = list(chunk_ids)
        searched = new_event(
            SEARCH_PERFORMED,
            tenant=settings.tenant,
            chunk_ids=found,
            time_s=time_s,
            session=visit.session,
            route=self._questions.topics[visit.topic].name,
            query=text,
            event_id=f"{run}-{self._noise_seed}-{visit.place}",
        )
        rng = np.random.default_rng((self._noise_seed, visit.place, 1))
        for rank, chunk_id in enumerate(found):
            if rng.random() < 0.6 / (1 + 0.5 * rank):
                used = new_event(
                    RESULT_USED,
                    tenant=settings.tenant,
                    chunk_ids=[chunk_id],
                    time_s=time_s + 0.5,
                    session=visit.session,
                    event_id=f"{run}-{self._noise_seed}-{visit.place}-used",
                )
                return [searched, used]
        return [searched]
