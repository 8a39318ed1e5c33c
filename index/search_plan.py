"""How a search of one k, width and recall target is done on one segment."""

from __future__ import annotations

from typing import Any, Final

from stoker.errors import InputError
from stoker.index.calibrated import EF_MAX
from stoker.index.range_recall import ChosenRanges
from stoker.index.recall_bounds import ChosenWalk
from stoker.index.settings import IndexSettings

K_MAX: Final = 1000
# From this target on, answers are scored by full vectors, reading those that are not resident.
EXACT_TARGET: Final = 0.99
# How much further from perfect than the target one query may expect to be without reading.
_RERANK_SLACK: Final = 1.4
# And how much further while earlier queries have been so much surer that the mean holds all the
# same: about what a full bucket gives to one. Under a lower bound one query in a hundred reads
# where the mean holds without.
_RERANK_CEILING: Final = 6.0
# The re-rank's share of what the target may lose, the rest being the walk's, by the bits of the
# codes that walks compare, where a caller chose the width. After coarse ones a query settles its
# answer by reads, each as long as a narrow walk: then a wider one costs less.
_RERANK_SHARE: Final = {4: 0.5, 2: 0.75}
# Its share at least where the target chooses the width. Calibration speaks of the worst kind of
# query, whose last few hundredths take walks that cost more than the reads that they save.
RERANK_SHARE_MIN: Final = 0.5
# The same where all vectors have room in memory: once they are loaded, answers are scored by them
# and the re-rank loses nothing. Until then its share is what the walk leaves, and queries read for
# that.
_RERANK_SHARE_LOADED: Final = 0.1
# Its share at least after a scan of groups of near rows: as much as those leave (`range_recall`).
_RANGE_SHARE_MIN: Final = 0.05
# What is lost of what the error model of coarse codes expects: all candidates of a query share a
# part of their errors, which changes no order. Measured on two sets of 100,000. Codes that end in
# whole blocks: 0.65 at most. Shorter ones, and those without a basis: 0.58 to 0.74 there, and more
# than all of it on 1,500 x 128 under l2, where queries that were let off found 0.92 at a target of
# 0.95. By kind of query: index/BENCHMARKS.md.
_COARSE_LOSS: Final = 0.65
_SHORTER_COARSE_LOSS: Final = 1.0


def target_of(settings: IndexSettings, recall_target: float | None) -> float:
    """The recall target: what was asked for, or the setting."""
    return settings.recall_target if recall_target is None else recall_target


def plan_search(
    settings: IndexSettings,
    navigation_bits: int,
    *,
    walk: ChosenWalk,
    k: int,
    ef: int | None,
    recall_target: float | None,
    normalize: bool,
    whole_blocks: bool,
    holds_all: bool = False,
) -> dict[str, Any]:
    """Work out how searches that ask for this are done, by ``walk``.

    Args:
        settings: The room's settings.
        navigation_bits: Of what walks compare: codes of 4 or 2, or whole vectors.
        walk: How they walk.
        k: Hits.
        ef: What was asked for, or None.
        recall_target: What was asked for, or None for the setting.
        normalize: Whether queries are taken at unit length.
        whole_blocks: Whether coarse codes end in whole blocks (the manifest's ``coarse_blocks``).
            Shorter ones lose more of what their error model expects.
        holds_all: Whether the budget has room for all pages.

    Returns:
        What the native search takes besides the question.
    """
    target = target_of(settings, recall_target)
    # The target is a mean over queries: one reads when its own expectation is further from
    # perfect than that, by what the others make up for. The error model takes a coarse walk's
    # candidates for all there are, so nothing is left to make up there.
    lost = 1.0
    if navigation_bits == 2:
        lost = _COARSE_LOSS if whole_blocks else _SHORTER_COARSE_LOSS
    share = _RERANK_SHARE.get(navigation_bits, RERANK_SHARE_MIN)
    slack = 1.0 / lost if navigation_bits == 2 else _RERANK_SLACK
    if ef is None and (navigation_bits == 2 or holds_all):
        # What the walk is seen to leave.
        left = 1.0 - (1.0 - walk.recall.mean) / max(1.0 - target, 1e-9)
        least = _RERANK_SHARE_LOADED if holds_all else RERANK_SHARE_MIN
        if left < RERANK_SHARE_MIN and holds_all:
            # No one query may lack much more than the mean of them.
            slack *= max(left, least) / RERANK_SHARE_MIN
        share = min(max(left, least), share)
    options = {
        "ef": walk.width,
        "entry_ef": walk.entry_width,
        "rerank_target": min(max(1.0 - slack * (1.0 - target), 0.0), 0.9999),
        "mean_loss": share * (1.0 - target) / lost,
        "loss_ceiling": min(_RERANK_CEILING * (1.0 - target) / lost, 1.0),
        # Coarse codes leave about twice as many candidates in doubt.
        "rerank_reads_max": max(settings.rerank_reads_max, 2 * k)
        * (2 if navigation_bits == 2 else 1),
        # Where rows are scanned since no walk finds enough, codes tell them apart badly too: rows
        # that are alike, or a few that all have in common. Vectors that have room are as cheap.
        "read_vectors": (target >= EXACT_TARGET and (recall_target is not None or ef is None))
        or (walk.scans and holds_all),
        "beam": settings.beam,
        "normalize": normalize,
        "spread": walk.spread,
    }
    if walk.near_mean > 0:
        options |= {
            "near_from": walk.near_from,
            "near_mean_loss": options["mean_loss"],
        }
        shorter = navigation_bits == 2 and not whole_blocks
        if (ef is not None or not holds_all) and not shorter:
            # Near queries lose less on the walk: what that leaves of what they may lose is the
            # re-rank's. Not until the vectors are loaded, where they soon are. Nor by shorter
            # codes, which show near queries surer than they are.
            near_share = 1.0 - (1.0 - walk.near_mean) / max(1.0 - target, 1e-9)
            options["near_mean_loss"] = max(near_share, share) * (1.0 - target) / lost
    if walk.near is not None:
        options["near_ef"] = walk.near.width
    measured = navigation_bits == 4 or (navigation_bits == 2 and whole_blocks)
    if measured and (ef is not None or not holds_all):
        _allow_what_is_measured(options, walk, target)
    return options


def _allow_what_is_measured(options: dict[str, Any], walk: ChosenWalk, target: float) -> None:
    """Let go without reading what leaves the target to queries like those that were measured.

    Of queries that are not near nobody can see which kind they are: the one counts that needs most.
    A kind for which a caller's width is too narrow, whatever is read, does not count.
    """
    if options.get("near_from") and walk.near_losses:
        allowance = walk.near_losses[0].allowance(target)
        if allowance is not None:
            options["near_mean_loss"] = allowance.mean_loss
            options["near_rerank_target"] = allowance.rerank_target
            options["near_line"] = allowance.line
    measured = [line.allowance(target) for line in walk.losses]
    known = [allowance for allowance in measured if allowance is not None]
    if not known:
        return
    strictest = max(known, key=lambda allowance: allowance.rerank_target)
    options["mean_loss"] = strictest.mean_loss
    options["rerank_target"] = strictest.rerank_target
    options["line"] = strictest.line


def wanted_of_walk(settings: IndexSettings, recall_target: float | None) -> float:
    """Mean recall that the target asks of a walk whose width it chooses: what the re-rank leaves.

    Args:
        settings: The room's settings.
        recall_target: What was asked for, or None for the setting.
    """
    target = target_of(settings, recall_target)
    return 1.0 - (1.0 - RERANK_SHARE_MIN) * (1.0 - target)


def sure_of_walk(
    settings: IndexSettings, recall_target: float | None, *, holds_all: bool
) -> float | None:
    """Mean recall that is as well enough, where it is sure; None where only the other will do.

    That is the target itself, where the re-rank loses nothing: it scores by vectors, all of which
    have room in memory or are read for it.

    Args:
        settings: The room's settings.
        recall_target: What was asked for, or None for the setting.
        holds_all: Whether the budget has room for all pages.
    """
    target = target_of(settings, recall_target)
    return target if holds_all or target >= EXACT_TARGET else None


def range_losses(
    target: float, ranges: ChosenRanges, navigation_bits: int, *, whole_blocks: bool
) -> dict[str, float]:
    """What settling may lose of a scan of groups: what those leave of what the target allows.

    Args:
        target: Recall aimed at in the mean.
        ranges: How many groups are looked at, and what they hold.
        navigation_bits: Of the codes that are compared.
        whole_blocks: See `plan_search`.

    Returns:
        The native search's ``mean_loss`` and ``rerank_target``.
    """
    lost = 1.0
    if navigation_bits == 2:
        lost = _COARSE_LOSS if whole_blocks else _SHORTER_COARSE_LOSS
    left = max(ranges.found - target, _RANGE_SHARE_MIN * (1.0 - target)) / lost
    return {"mean_loss": left, "rerank_target": min(max(1.0 - _RERANK_SLACK * left, 0.0), 0.9999)}


def check_question(k: int, ef: int | None, recall_target: float | None) -> None:
    """Refuse what no search can be asked for."""
    if not 1 <= k <= K_MAX:
        raise InputError(f"k: expected 1 to {K_MAX}, found {k}")
    if ef is not None and not 1 <= ef <= EF_MAX:
        raise InputError(f"ef: expected 1 to {EF_MAX}, found {ef}")
    if recall_target is not None and not 0 < recall_target <= 1:
        raise InputError(f"recall_target: expected above 0 up to 1, found {recall_target}")
