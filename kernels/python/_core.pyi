"""Native core of Stoker: page pool, codes, and the walk over a segment."""

from collections.abc import Sequence
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray


def simd_name() -> str: ...

def crc32c(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], seed: int = 0) -> int: ...

def crc32c_pages(pages: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> NDArray[numpy.uint32]: ...

def first_unusable_row(vectors: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> int:
    """
    The first row with a value that is not finite, or whose squared length is not; else -1.
    """

@overload
def ids_of_rows(ids: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """Writes ids[rows] to `out`, -1 where the row is negative."""

@overload
def ids_of_rows(ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

class CoarseBasis:
    """The directions that coarse codes keep, and with how many bits."""

    def __init__(self, *, wide_blocks: int, fine: int, blocks: int, steps: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None:
        """
        `steps`: float32, shape (directions,); `rows`: bits of float16, shape (directions, dim).
        """

    @property
    def wide_blocks(self) -> int: ...

    @property
    def directions(self) -> int: ...

    @property
    def fine(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    @property
    def steps(self) -> NDArray[numpy.float32]: ...

    @property
    def rows(self) -> NDArray[numpy.uint16]:
        """The same, one row after the other."""

def encode(vectors: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], *, seed: int, centre: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], basis: CoarseBasis | None = None, row_length2: float = 0.0) -> tuple:
    """
    Navigation, refinement and coarse records of float32 vectors, shape (n, dim).

    ``row_length2``: 0, or of inner products with rows of about one length: its square.
    """

def meet_rows(queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], vectors: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], *, first_row: int, l2: bool, scores: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], rows: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """
    Put the rows of float32 vectors that beat a query's best so far among those, in place.

    Scores are <q, x>, or under l2 2 <q, x> - <x, x>; float32, shape (nq, k), falling. Equal
    ones stay in the order in which they were met. ``rows``: int64, of the same shape.
    """

def code_record_bytes(dim: int) -> int: ...

def coarse_record_bytes(dim: int) -> int: ...

def refine_record_bytes(dim: int) -> int: ...

def rotate(vector: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, seed: int) -> NDArray[numpy.float32]: ...

def locality_order(ids: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)], groups: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, page_nodes: int) -> NDArray[numpy.uint32]: ...

def pack_links(ids: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)], *, id_bits: int, record_bytes: int, per_page: int, page_bytes: int) -> NDArray[numpy.uint8]: ...

def unpack_links(pages: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], rows: int, m: int, *, id_bits: int, record_bytes: int, per_page: int) -> tuple:
    """
    The inverse of pack_links: uint32 ids, shape (rows, m), and uint16 counts.
    """

class SnapshotCounts:
    """
    Who reads which version: readers count without a lock, one writer at a time.
    """

    def __init__(self) -> None:
        """Slot 0 is present."""

    def acquire(self) -> int:
        """Take a reference to the present version; returns its slot."""

    def release(self, slot: int) -> None:
        """Give a reference back."""

    def vacant(self) -> int:
        """The slot for the next version; the same one until it is published."""

    def publish(self, slot: int) -> list[int]:
        """Make the vacant slot the present one; returns what `reclaim` does."""

    def reclaim(self) -> list[int]:
        """Superseded slots that nobody holds; each is named once."""

    def references(self, slot: int) -> int:
        """References that are counted now."""

class CancelFlag:
    """A flag that stops a running load between two reads."""

    def __init__(self) -> None: ...

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

class PagePool:
    """A byte budget of page frames over the pages of many files."""

    def __init__(self, *, page_bytes: int, budget_bytes: int, backend: str = 'automatic', direct: bool = True, io_threads: int = 16, prefetch_inflight_bytes_max: int = 2097152, volume_reads_s: float = 0.0, volume_bytes_s: float = 0.0) -> None: ...

    def add_store(self, *, path: str, offset_bytes: int, page_count: int, table_offset_bytes: int, table_crc: int, cluster_pages: int = 1) -> int:
        """Pages whose checksums lie in the same file; read when first needed."""

    def remove_store(self, store: int) -> None: ...

    def load(self, store: int, pages: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, sticky: bool = False, weight: int = 3, evict: bool = False, deadline_s: float | None = None, cancel: CancelFlag | None = None) -> dict: ...

    def unstick(self, store: int, pages: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def evict(self, store: int, pages: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int: ...

    def fetch(self, store: int, pages: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple:
        """
        Copies of pages, and a status each: 0 ok, 1 corrupt, 2 I/O error, 3 deadline.
        """

    def residency(self, store: int) -> NDArray[numpy.uint8]:
        """
        One byte a page: 0 absent, 1 resident, 2 resident and sticky, 3 quarantined.
        """

    def stats(self) -> dict: ...

    def store_stats(self, store: int) -> dict: ...

    def set_budget(self, budget_bytes: int) -> None: ...

    def check(self) -> None: ...

    @property
    def backend(self) -> str: ...

    def direct_io(self, store: int) -> bool: ...

class SegmentLayout:
    """Where a segment's records lie in its pages."""

    def __init__(self, *, dim: int, count: int, l2: bool, entry_row: int, code_error: float, refine_error: float) -> None: ...

    def set_links(self, store: int) -> None: ...

    def add_level(self, *, count: int, m: int, id_bits: int, record_bytes: int, per_page: int, first_page: int) -> None:
        """Adds the next level, the bottom first."""

    def set_codes(self, *, store: int, record_bytes: int, per_page: int) -> None: ...

    def set_coarse(self, *, store: int, record_bytes: int, per_page: int, error: float) -> None:
        """Navigates on these 2-bit codes; `error` as the constructor's."""

    def set_refine(self, *, store: int, record_bytes: int, per_page: int) -> None: ...

    def set_vectors(self, *, store: int, record_bytes: int, half: bool) -> None: ...

    def set_walk_vectors(self, *, unit_rows: bool) -> None:
        """
        Navigates on the vectors themselves; `unit_rows` where the measure is the cosine.
        """

    def set_ranges(self, *, store: int, groups: int, record_bytes: int, per_page: int, pieces: int, whole_nearest: int, small_share: int) -> None:
        """
        Where the table of groups of near rows lies. Beyond the nearest ones, pieces of less than a so manieth of their group's rows are left out.
        """

class SearchOptions:
    """How searches of one k, width and recall target are done."""

    def __init__(self, *, k: int, ef: int, rerank_target: float, mean_loss: float, loss_ceiling: float, rerank_reads_max: int, read_vectors: bool, beam: int, normalize: bool, near_ef: int = 0, near_from: float = 0.0, spread: float = 0.0, entry_ef: int = 1, near_mean_loss: float = 0.0, near_rerank_target: float | None = None, line: Sequence[float] = [0.0, 1.0, 0.0, 0.0, 0.0], near_line: Sequence[float] = [0.0, 1.0, 0.0, 0.0, 0.0]) -> None:
        """
        Lines: least, share, read_least, read_share, mixed of `LossLine` in stoker/segment.hpp.
        """

    def add_farther(self, *, below: float, ef: int, entry_ef: int, range_groups: int = 0) -> None:
        """
        How walks go on for queries that lie farther than `below` from what they find, or to how many groups scans of `set_ranges` do.
        """

    def set_ranges(self, *, groups: int, mean_loss: float, rerank_target: float, hurried: bool = False) -> None:
        """
        A walk that misses a page is left for a scan of so many groups, the nearest, which loses no more in the mean than this when it is settled; `hurried`: only by who has a deadline.
        """

    @property
    def mean_loss(self) -> float: ...

class Facts:
    """What the searches of a batch say of themselves."""

    def columns(self) -> NDArray[numpy.float64]:
        """
        float64, a row a query: expected_recall, expanded, evaluated, skipped, exact, refined, damaged, rounds, pages_read, bytes_read, deadline_hit, scanned, found, best, query_length, narrow, farther, unrelated, range_groups, ranges_whole.
        """

class NativeSegment:
    """Search over a segment's pages in a pool."""

    def __init__(self, *, pool: object, layout: SegmentLayout, dim: int, seed: int, centre: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], basis: CoarseBasis | None = None, row_length2: float = 0.0) -> None: ...

    def search(self, queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], scores: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], options: SearchOptions, *, resident_only: bool = False, deadline_s: float | None = None, allow: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, threads: int = 1) -> Facts:
        """
        Fills, for each query, its k rows (int64; -1 where there are fewer) and their scores (float32; not-a-number there).
        """

    def answer(self, queries: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)], ids: Annotated[NDArray[numpy.int64], dict(order='C', device='cpu')], scores: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')], options: SearchOptions, threads: int) -> Facts | None:
        """
        Fills ids (-1 where there are fewer) and scores of one query, shape (dim,), or of a batch, with no filter and no deadline. Returns None, and the arrays hold nothing of use, where queries have another shape or are not finite, ids are not set, or after `close`.
        """

    @overload
    def set_ids(self, ids: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """The id of each row, for `answer`."""

    @overload
    def set_ids(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def close(self) -> None:
        """Refuse further calls of `answer`, and wait for those under way."""

    def vectors(self, rows: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple:
        """
        Exact vectors as float32, and how many could not be read (not-a-number).
        """

    def page_counts(self) -> tuple:
        """
        Records of all searches whose page was in memory when wanted, and was not.
        """

    def nearest_groups(self, queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], most: int) -> NDArray[numpy.uint32]:
        """
        The groups of the range table that lie nearest to each query, in order, uint32; 2^32 - 1 where there are fewer.
        """

    def estimate_errors(self, query: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple: ...

class EventScanner:
    """Scans envelopes of events into a batch's columns."""

    def __init__(self, *, types: Sequence[str], keys_min: Sequence[int], content_types: Sequence[str], payload_bytes_max: int, id_max: int, source_max: int, name_max: int, key_max: int, query_max: int, keys_max: int) -> None: ...

    def scan(self, payloads: list) -> EventBatch:
        """Return a batch with a row per payload; None makes a row that is out."""

class EventBatch:
    """Events as columns, a row each."""

    def __init__(self) -> None: ...

    def __len__(self) -> int: ...

    def states(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """uint8, shape (n,): 0 undecided, 1 ready, 2 out."""

    def kinds(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """uint8, shape (n,): the place of the row's type among the scanner's."""

    def times(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """float64, shape (n,): Unix seconds."""

    def undecided(self) -> list[int]:
        """The rows that a full decoder has to settle."""

    @property
    def ready_count(self) -> int: ...

    def values(self, row: int) -> tuple:
        """Return (kind, time_s, id, tenant, session, keys)."""

    def put(self, row: int, *, kind: int, time_s: float, id: str, tenant: str, session: str | None, keys: Sequence[str]) -> None:
        """Settle an undecided row."""

    def append(self, *, kind: int, time_s: float, id: str, tenant: str, session: str | None, keys: Sequence[str]) -> None:
        """Add a row that is ready."""

    def drop(self, row: int) -> None:
        """Put a row out."""

class KeyRun:
    """A run of rows with their keys' numbers."""

    @property
    def stop(self) -> int: ...

    def rows(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    def sizes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    def numbers(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    def settle(self, place: int, number: int) -> None:
        """Give a key of the run its number."""

    def outside(self, batch: EventBatch) -> tuple:
        """Where a number is absent: (places, rows of the run, content hashes)."""

    def name(self, batch: EventBatch, row: int, place: int) -> tuple:
        """The (group, key) at a place of the run."""

    def cut(self, count: int) -> None:
        """Keep only the first rows."""

class KeyTable:
    """(group, key) to 0, 1, 2, ... as they were added."""

    def __init__(self) -> None: ...

    def __len__(self) -> int: ...

    @property
    def bytes_used(self) -> int: ...

    def find(self, group: str, key: str) -> int:
        """The number, or -1."""

    def add(self, group: str, key: str) -> int:
        """The number, a new one where there was none."""

    def names(self, start: int) -> list:
        """(group, key) of the numbers from `start` on."""

    def members(self, group: str) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """int64: the numbers of one group's keys, rising."""

    def keep(self, numbers: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Keep only these (rising), renumbered 0, 1, 2, ..."""

    def intern(self, batch: EventBatch, *, start: int, kinds_end: int, stop_kind: int, keys_max: int, grow: bool) -> KeyRun:
        """Look up the keys of the ready rows from `start` on."""

class SessionTable:
    """The first keys of each session's last row."""

    def __init__(self) -> None: ...

    def __len__(self) -> int: ...

    def load(self, group: str, name: str, time_s: float, numbers: Sequence[int]) -> None: ...

    def clear(self) -> None: ...

    def items(self) -> list:
        """(group, name, time_s, numbers), the least recent first."""

    def renumber(self, number: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def links(self, batch: EventBatch, run: KeyRun, times_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], *, kind: int, width: int, gap_s: float, sessions_max: int, window: int) -> tuple:
        """
        Note each session's rows; return what is linked as (tails, heads, times).
        """

class IdWindow:
    """Fingerprints of the ids seen lately, per group."""

    def __init__(self, seed: int) -> None: ...

    def __len__(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def bytes_used(self) -> int: ...

    @property
    def span_s(self) -> float:
        """Seconds that the ids cover."""

    def pass_rows(self, batch: EventBatch, times_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], *, bytes_max: int, age_s_max: float) -> int:
        """Put out the rows whose id is held; return how many."""

    def add(self, group: str, id: str, time_s: float, *, bytes_max: int, age_s_max: float) -> bool:
        """Remember one id; False where it is held."""

    def fingerprints(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
        """uint64, shape (len,), the oldest first."""

    def marks(self) -> list:
        """
        (time_s, how many ids came from then until the next), the oldest first.
        """

    def load(self, fingerprints: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], times_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Take over what another window of this seed held."""

def content_hash(group: str, key: str) -> int:
    """A number for (group, key) that is the same in every process."""

def add_edges(targets: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], weights: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], tails: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], heads: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], grown: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """Strengthen edges in rows of slots, in place."""

def add_runs(values: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], numbers: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], grown: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)], amounts: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """
    Add each run's growth times the amount to its keys' values, per part, in place.
    """

class LinkCounts:
    """Bounded counts of what goes with a key. One thread at a time."""

    def __init__(self, *, degree: int) -> None: ...

    def add(self, keys: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], others: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Count each key once, together with all others but itself."""

    def spread(self, keys: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], amounts: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)], *, prior: float) -> tuple:
        """
        Return (companions, their shares of the amounts), in the order of first mention.
        """

    def renumber(self, numbers: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Give keys new numbers; below 0 a key is forgotten."""

    @property
    def bytes(self) -> int:
        """Bytes held."""

def add_excitations(values: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], sums: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')], rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], amounts: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)], groups: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], grown: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """
    Add each row's amount groups[term], where >= 0, times the term's growth, in place.
    """

def withdraw_excitations(values: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], sums: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')], rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], amounts: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)], groups: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], grown: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """
    Take back what was added with that growth, in place; nothing falls below 0.
    """

def weighted_rows(values: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)], weights: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], base: float, rows: int) -> NDArray[numpy.float32]:
    """
    Return the weighted sum of each of the first rows, plus base, as float32.
    """

def add_shares(values: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], weights: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], base: float, out: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    Add to out what part of each row's weighted sum plus base each term has, in place.
    """

def renew_rows(rates: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], inside: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu')], *, capacity: int, swaps: int, gain: float) -> tuple[list[int], list[int]]:
    """
    Renew which rows are inside, in place; return (rows that left, rows that came).
    """
