// What a query's walk is made of: levels, one after the other, and what a filter asks for beside
// them. `walk_level.cpp` walks one.
#include "walk.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace stoker {
namespace {

// A scan of allowed rows costs about one code comparison each; a walk under a filter costs about
// `kWalkFactor` comparisons per answer slot, and needs 1/selectivity as many slots.
constexpr double kWalkFactor = 52;
// Rows beyond twice the answer that a scan keeps until they are settled.
constexpr std::size_t kScanSpare = 100;
// How much wider a walk under a filter begins anew where it did not meet enough allowed rows.
constexpr std::size_t kWiden = 4;

}  // namespace

Walk::Walk(Searcher& searcher, Searcher::Scratch& scratch, Settling& settling)
    : searcher_(searcher),
      s_(scratch),
      settling_(settling),
      params_(settling.params),
      query_(settling.query),
      stats_(settling.stats),
      layout_(searcher.layout_),
      pool_(searcher.pool_),
      links_(pool_.view(layout_.links)),
      codes_(layout_, searcher.quantizer_, searcher.kernels_),
      vectors_(layout_, searcher.kernels_, pool_, settling),
      by_vectors_(layout_.walk_vectors),
      grade_(walked_grade(layout_)),
      walked_(pool_.view(codes_.records.store)),
      filtered_(params_.allow != nullptr) {}

void Walk::run(const float* query) {
  settling_.list.clear();
  if (layout_.count == 0 || params_.k == 0) return;
  prepare_query(searcher_.quantizer_, query, layout_.metric == Metric::l2, query_,
                codes_.in_basis);
  stats_.query_length = query_.whole_length;
  stats_.unrelated = query_.unrelated;
  stats_.expected_recall = 0;   // until something is found
  code_offset_ = codes_.offset(query_);
  code_scale_ = codes_.scale(query_);
  product_factor_ = query_.product_factor;
  length_factor_ = query_.length_factor;
  sigma_factor_ = -product_factor_ * codes_.error * query_.length;
  settling_.offset = query_.constant;
  if (by_vectors_) {
    // Nothing is added to small distances: rows by the thousand may differ by less than it rounds.
    double length2 = 0;
    for (const float x : query_.original) length2 += static_cast<double>(x) * x;
    settling_.query_length = std::sqrt(length2);
    settling_.offset =
        layout_.metric == Metric::l2 ? 0.0f : static_cast<float>(settling_.query_length);
  }
  s_.visited.resize((layout_.count + 63) / 64, 0);

  params_.ef = std::max(params_.ef, params_.k);
  std::size_t ef = params_.ef;
  s_.allowed.reset(ef);
  if (filtered_) {
    if (params_.allow_count == 0) {
      stats_.expected_recall = 1;   // of nothing
      return;
    }
    const double selectivity =
        static_cast<double>(params_.allow_count) / static_cast<double>(layout_.count);
    const double scan_cost = static_cast<double>(params_.allow_count);
    const double walk_cost = static_cast<double>(ef) / selectivity * kWalkFactor;
    if (scan_cost <= walk_cost) {
      scan_allowed();
      settling_.list.swap(s_.allowed.items());
      return;
    }
    ef = std::min<std::size_t>(layout_.count,
                               static_cast<std::size_t>(static_cast<double>(ef) / selectivity));
  }
  walk(ef);
  if (left_ && !scan_ranges()) {
    left_ = false;
    params_.range_groups = 0;
    s_.allowed.reset(params_.ef);
    walk(ef);
  }
  if (filtered_ && !left_) {
    params_.range_groups = 0;   // what it misses it reads
    widen(ef);
  }
  forget_visited();
  settling_.list.swap((filtered_ ? s_.allowed : s_.nearest).items());
}

// Walks down to the bottom, and over it as widely as the query needs.
void Walk::walk(std::size_t ef) {
  const std::size_t near_ef = std::max(params_.near_ef, params_.k);
  const bool tries = params_.near_ef != 0 && !filtered_ && near_ef < ef;
  const bool widely = params_.entry_ef > 1 && layout_.levels.size() > 1;
  descend(widely && !tries ? params_.entry_ef : 1);
  if (left_) return;
  if (tries || params_.farther_count > 0) s_.entries = s_.nearest.items();
  if (tries) {
    walk_level(0, near_ef, true);
    if (left_) return;
    stats_.narrow = is_near();
    if (!stats_.narrow) widely ? enter_widely(params_.entry_ef) : begin_anew();
    if (left_) return;
  }
  if (!stats_.narrow) {
    walk_level(0, ef, true);
    if (left_) return;
    if (!filtered_) go_farther();
    if (left_) return;
  }
  if (params_.near_mean_loss > 0 && !filtered_ && (tries ? stats_.narrow : is_near())) {
    params_.mean_loss = params_.near_mean_loss;
    params_.rerank_target = params_.near_rerank_target;
    params_.line = params_.near_line;
  }
}

// How near the query lies to the best that was met, by its codes; see index/recall_bounds.py. Not a
// number where nothing was met, and of what is near nothing, as a query at the origin.
float Walk::nearness() const {
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  if (s_.nearest.items().empty()) return kNone;
  const float distance = s_.nearest.items().front().distance;
  if (layout_.metric == Metric::l2) {
    const float unrelated = query_.length * query_.length + params_.spread;
    return unrelated > 0 ? (unrelated - (distance + settling_.offset)) / unrelated : kNone;
  }
  const float most = query_.ideal - query_.unrelated;
  return most > 0 ? (settling_.offset - distance - query_.unrelated) / most : kNone;
}

// Whether a whole walk has ended as near to the query as narrow walks have to.
bool Walk::is_near() const { return stats_.skipped == 0 && nearness() >= params_.near_from; }

// Which of the farther walks is for a query as far from what was met, from 1; 0: none.
std::uint32_t Walk::farther_band() const {
  if (params_.farther_count == 0 || s_.nearest.items().empty()) return 0;
  const float near = nearness();
  std::uint32_t band = 0;
  // What is no number lies below all edges.
  while (band < params_.farther_count && !(near >= params_.farther[band].below)) ++band;
  return band;
}

// Goes on, wider, where a whole walk has ended so far from the query that walks of its width are
// known to miss much of what such queries ask for.
void Walk::go_farther() {
  if (stats_.skipped > 0) return;
  const std::uint32_t chosen = farther_band();
  if (chosen == 0) return;
  const FartherWalk& walk = params_.farther[chosen - 1];
  if (walk.ef <= params_.ef) return;
  if (params_.deadline && Clock::now() >= *params_.deadline) {
    stats_.deadline_hit = true;
    return;
  }
  if (walk.entry_ef > 1 && layout_.levels.size() > 1) {
    enter_widely(walk.entry_ef);
    if (left_) return;
  } else {
    begin_anew();
  }
  walk_level(0, walk.ef, true);
  stats_.farther = chosen;
}

// Whether the allowed rows that were met hold the nearest ones: among all the rows that lie as near
// as the `among`-th that was met, the allowed ones were met too. False where so many were not.
bool Walk::covers_answer(std::size_t among) const {
  const std::vector<Candidate>& allowed = s_.allowed.items();
  const std::vector<Candidate>& nearest = s_.nearest.items();
  const std::size_t wanted = std::min<std::size_t>(params_.k, params_.allow_count);
  return allowed.size() >= wanted && among > 0 && nearest.size() >= among &&
         allowed[wanted - 1].distance <= nearest[among - 1].distance;
}

// What a filter allows may lie anywhere but where the query is: another tenant's rows, or another
// topic's. The width that would do if it were spread evenly then meets few or none of it, and the
// walk goes on from where it is, wider each time, until it has them or a scan costs no more.
void Walk::widen(std::size_t ef) {
  while (!covers_answer(s_.nearest.items().size()) && stats_.skipped == 0) {
    if (params_.deadline && Clock::now() >= *params_.deadline) {
      stats_.deadline_hit = true;
      ++stats_.skipped;
      return;
    }
    ef *= kWiden;
    if (static_cast<double>(params_.allow_count) <= static_cast<double>(ef) * kWalkFactor) {
      scan_allowed();
      return;
    }
    begin_anew();
    s_.allowed.reset(params_.ef);
    walk_level(0, ef, true);
  }
}

// Makes the nodes that a walk kept the starts of the next one.
void Walk::begin_anew() {
  forget_visited();
  for (Candidate& candidate : s_.nearest.items()) {
    candidate.expanded = false;
    visit(candidate.row);
  }
}

void Walk::forget_visited() {
  for (const std::uint32_t row : s_.visited_rows) s_.visited[row >> 6] = 0;
  s_.visited_rows.clear();
}

// After a walk that was not enough: walks the level above the bottom, from where it was left, and
// enters the bottom at what is found there and at what that walk ended with.
void Walk::enter_widely(std::uint32_t entry_ef) {
  s_.kept.swap(s_.nearest.items());
  s_.nearest.items().swap(s_.entries);
  begin_anew();
  walk_level(1, entry_ef, false);
  if (left_) {   // with all that was met
    s_.nearest.items().insert(s_.nearest.items().end(), s_.kept.begin(), s_.kept.end());
    return;
  }
  std::vector<Candidate>& starts = s_.nearest.items();
  s_.entries = starts;   // of a walk after the one that follows
  begin_anew();
  for (const Candidate& candidate : s_.kept) {
    if (!visit(candidate.row)) continue;
    starts.push_back(candidate);
    starts.back().expanded = false;
  }
}

// Follows the upper levels down to level 1, that one by a walk of `entry_ef`. The others greedily
// when the bottom can be had; with the full width when it may not be, since the upper nodes may
// then be all the answer there is.
void Walk::descend(std::size_t entry_ef) {
  const std::size_t top = layout_.levels.size() - 1;
  const bool careful = !settling_.reading || params_.deadline.has_value();
  const std::size_t width = careful ? params_.ef : 1;
  const std::size_t last = std::max(width, entry_ef);
  s_.links_missing.clear();
  s_.codes_missing.clear();
  s_.nearest.reset(top == 0 ? params_.ef : width);
  level_ = &layout_.levels[top];
  visit(layout_.entry_row);
  s_.neighbors.assign(1, layout_.entry_row);
  {
    const PagePool::ReadGuard guard(pool_);
    fetch_codes();
    compare_codes();
  }
  for (std::size_t level = top; level >= 1; --level) {
    walk_level(static_cast<std::uint32_t>(level), level == 1 ? last : width, false);
    if (left_) return;
    begin_anew();
  }
}

// Compares the query with every allowed row, for filters that leave few.
void Walk::scan_allowed() {
  stats_.scanned = true;
  // Every row is met, and only what the list drops is lost before it is settled: it is as long as
  // codes may mistake the order, however narrow a walk was asked for.
  s_.allowed.reset(std::max<std::size_t>(params_.ef, 2 * std::size_t{params_.k} + kScanSpare));
  s_.nearest.reset(1);   // not used, but offer() fills it
  level_ = &layout_.levels[0];
  offering_ = true;
  counting_ = true;
  std::vector<std::uint32_t> chunk;
  constexpr std::size_t kChunk = 512;
  auto flush = [&] {
    s_.neighbors.swap(chunk);
    chunk.clear();
    {
      const PagePool::ReadGuard guard(pool_);
      fetch_codes();
      compare_codes();
    }
    while (!s_.codes_missing.empty()) {
      if (!may_read(settling_)) {
        stats_.skipped += static_cast<std::uint32_t>(s_.codes_missing.size());
        s_.codes_missing.clear();
        break;
      }
      read_missing(layout_.levels[0]);
    }
  };
  for (std::uint32_t byte = 0; byte < (layout_.count + 7) / 8; ++byte) {
    std::uint8_t bits = params_.allow[byte];
    while (bits != 0) {
      const auto bit = static_cast<std::uint32_t>(__builtin_ctz(bits));
      bits = static_cast<std::uint8_t>(bits & (bits - 1));
      const std::uint32_t row = byte * 8 + bit;
      if (row >= layout_.count) break;
      chunk.push_back(row);
    }
    if (chunk.size() >= kChunk) flush();
  }
  if (!chunk.empty()) flush();
}

}  // namespace stoker
