"""Native core of Stoker: page pool, codes, and the walk over a segment."""

from typing import Annotated

import numpy
from numpy.typing import NDArray


def simd_name() -> str: ...

def crc32c(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], seed: int = 0) -> int: ...

def crc32c_pages(pages: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> NDArray[numpy.uint32]: ...

def encode(vectors: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], *, seed: int, centre: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple:
    """Navigation and refinement records of float32 vectors, shape (n, dim)."""

def code_record_bytes(dim: int) -> int: ...

def refine_record_bytes(dim: int) -> int: ...

def rotate(vector: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, seed: int) -> NDArray[numpy.float32]: ...

def locality_order(ids: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)], groups: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, page_nodes: int) -> NDArray[numpy.uint32]: ...

def pack_links(ids: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)], *, id_bits: int, record_bytes: int, per_page: int, page_bytes: int) -> NDArray[numpy.uint8]: ...

class CancelFlag:
    """A flag that stops a running load between two reads."""

    def __init__(self) -> None: ...

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

class PagePool:
    """A byte budget of page frames over the pages of many files."""

    def __init__(self, *, page_bytes: int, budget_bytes: int, backend: str = 'automatic', direct: bool = True, io_threads: int = 16, prefetch_inflight_bytes_max: int = 2097152) -> None: ...

    def add_store(self, *, path: str, offset_bytes: int, page_count: int, checksums: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int: ...

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

    def set_refine(self, *, store: int, record_bytes: int, per_page: int) -> None: ...

    def set_vectors(self, *, store: int, record_bytes: int, half: bool) -> None: ...

class NativeSegment:
    """Search over a segment's pages in a pool."""

    def __init__(self, *, pool: object, layout: SegmentLayout, dim: int, seed: int, centre: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def search(self, queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], *, k: int, ef: int, rerank_target: float, rerank_reads_max: int, read_vectors: bool, resident_only: bool, beam: int, deadline_s: float | None = None, allow: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, threads: int = 1, normalize: bool = False) -> tuple:
        """
        Rows (-1 where there are fewer than k), scores (not-a-number there), and float64 facts per query: expected_recall, expanded, evaluated, skipped, exact, refined, damaged, rounds, pages_read, bytes_read, deadline_hit, scanned.
        """

    def vectors(self, rows: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple:
        """
        Exact vectors as float32, and how many could not be read (not-a-number).
        """

    def page_counts(self) -> tuple:
        """
        Records of all searches whose page was in memory when wanted, and was not.
        """

    def estimate_errors(self, query: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple: ...
