#include "walk.hpp"

#include <algorithm>
#include <cmath>

namespace stoker {
namespace {

inline void prefetch_lines(const void* address, std::size_t bytes) {
  const char* p = static_cast<const char*>(address);
  for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
}

inline float read_f32(const std::uint8_t* p) {
  float value;
  std::memcpy(&value, p, 4);
  return value;
}

// A scan of allowed rows costs about one code comparison each; a walk under a filter costs about
// `kWalkFactor` comparisons per answer slot, and needs 1/selectivity as many slots.
constexpr double kWalkFactor = 52;
// Rows beyond twice the answer that a scan keeps until they are settled.
constexpr std::size_t kScanSpare = 100;
// How much wider a walk under a filter begins anew where it did not meet enough allowed rows.
constexpr std::size_t kWiden = 4;

// Nodes whose links a walk, unless it is greedy, follows before their neighbors are compared, so
// that the cache misses of all of them overlap. Measured at 100,000 x 384: 2 to 4 are alike, 20 to
// 30 % faster than one at the same recall; what they evaluate too much buys recall.
constexpr std::size_t kExpandTogether = 3;

// How far a walk goes on, while missing pages are gathered, where frames lie idle: what it then
// reads too much takes nobody's place, and is wanted soon. No more than a part of its width, since
// a narrow walk ends before it comes to what lies behind. Nothing loaded, 1,000,000 x 384, width
// 768: 4 are 78 rounds and 74 MB for the first query and 1,388 rounds for the first 200; 16 31,
// 76 MB and 719; 64 22, 92 MB and 437. 16 at width 32: a third fewer rounds, but half as many bytes
// again.
constexpr std::uint32_t kRoomyAhead = 16;
constexpr std::size_t kRoomyWidthShare = 8;

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
      l2_factor_(layout_.metric == Metric::l2 ? 1.0f : 0.0f),
      dot_factor_(layout_.metric == Metric::l2 ? -2.0f : -1.0f),
      filtered_(params_.allow != nullptr) {}

void Walk::run(const float* query) {
  settling_.list.clear();
  if (layout_.count == 0 || params_.k == 0) return;
  prepare_query(searcher_.quantizer_, query, layout_.metric == Metric::l2, query_,
                codes_.in_basis);
  stats_.query_length = query_.length;
  stats_.expected_recall = 0;   // until something is found
  code_offset_ = codes_.offset(query_);
  code_scale_ = codes_.scale(query_);
  sigma_factor_ = -dot_factor_ * codes_.error * query_.length;
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
  const std::size_t near_ef = std::max(params_.near_ef, params_.k);
  const bool tries = params_.near_ef != 0 && !filtered_ && near_ef < ef;
  const bool widely = params_.entry_ef > 1 && layout_.levels.size() > 1;
  descend(widely && !tries ? params_.entry_ef : 1);
  if (tries) {
    s_.entries = s_.nearest.items();
    walk_level(0, near_ef, true);
    stats_.narrow = is_near();
    if (!stats_.narrow) widely ? enter_widely() : begin_anew();
  }
  if (!stats_.narrow) walk_level(0, ef, true);
  if (params_.near_mean_loss > 0 && !filtered_ && (tries ? stats_.narrow : is_near())) {
    params_.mean_loss = params_.near_mean_loss;
  }
  if (filtered_) widen(ef);
  forget_visited();
  settling_.list.swap((filtered_ ? s_.allowed : s_.nearest).items());
}

// Whether a whole walk has ended as near to the query as narrow walks have to, by its codes. What
// no number is near, as a query at the origin, is not.
bool Walk::is_near() const {
  if (s_.nearest.items().empty() || stats_.skipped > 0) return false;
  const float distance = s_.nearest.items().front().distance;
  const float length = query_.length;
  if (layout_.metric == Metric::l2) {
    const float unrelated = length * length + params_.spread;
    return unrelated - (distance + settling_.offset) >= params_.near_from * unrelated &&
           unrelated > 0;
  }
  return settling_.offset - distance >= params_.near_from * length && length > 0;
}

// Whether the allowed rows that were met hold the nearest ones: among all the rows that lie as near
// as the farthest that the walk kept, it has met the allowed ones too.
bool Walk::covers_answer() const {
  const std::vector<Candidate>& allowed = s_.allowed.items();
  const std::size_t wanted = std::min<std::size_t>(params_.k, params_.allow_count);
  return allowed.size() >= wanted && !s_.nearest.items().empty() &&
         allowed[wanted - 1].distance <= s_.nearest.items().back().distance;
}

// What a filter allows may lie anywhere but where the query is: another tenant's rows, or another
// topic's. The width that would do if it were spread evenly then meets few or none of it, and the
// walk goes on from where it is, wider each time, until it has them or a scan costs no more.
void Walk::widen(std::size_t ef) {
  while (!covers_answer() && stats_.skipped == 0) {
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

// After a narrow walk that was not enough: walks the level above the bottom, from where it was
// left, and enters the bottom at what is found there and at what the narrow walk ended with.
void Walk::enter_widely() {
  s_.kept.swap(s_.nearest.items());
  s_.nearest.items().swap(s_.entries);
  begin_anew();
  walk_level(1, params_.entry_ef, false);
  std::vector<Candidate>& starts = s_.nearest.items();
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
    begin_anew();
  }
}

// A hint: by the time that the node is followed, its links are there. Needs no ReadGuard, since
// nothing is read.
inline void Walk::prefetch_links(std::uint32_t row) const {
  const std::byte* page = links_.peek(level_->page_of(row));
  if (page != nullptr) prefetch_lines(page + level_->offset_of(row), level_->record_bytes);
}

// How many times a walk of this width goes on while missing pages are gathered.
std::uint32_t Walk::ahead_max(std::size_t ef) const {
  if (!roomy_) return params_.beam;
  const auto share = static_cast<std::uint32_t>(
      std::min<std::size_t>(ef / kRoomyWidthShare, kRoomyAhead));
  return std::max(params_.beam, share);
}

void Walk::walk_level(std::uint32_t level_number, std::size_t ef, bool bottom) {
  const LinkLevel& level = layout_.levels[level_number];
  const std::vector<Candidate> starts = s_.nearest.items();
  s_.nearest.reset(ef);
  for (const Candidate& candidate : starts) {
    s_.nearest.insert(candidate);
    if (bottom && filtered_ && is_allowed(candidate.row)) s_.allowed.insert(candidate);
  }
  offering_ = bottom && filtered_;
  counting_ = bottom;
  level_ = &level;
  const std::size_t together = ef > 1 ? kExpandTogether : 1;
  for (;;) {
    {
      const PagePool::ReadGuard guard(pool_);
      const std::uint32_t most = ahead_max(ef);
      std::uint32_t ahead = 0;
      for (;;) {
        const bool pending = !s_.links_missing.empty() || !s_.codes_missing.empty();
        if (pending && ahead++ >= most) break;
        bool any = false;
        for (std::size_t n = 0; n < together; ++n) {
          const Candidate* candidate = s_.nearest.next();
          if (candidate == nullptr) break;
          any = true;
          expand(candidate->row, level);
        }
        if (!any) break;
        compare_codes();
        // Most have been since they were met, but not those that moved up.
        s_.nearest.peek_next(together, [this](const Candidate& c) { prefetch_links(c.row); });
      }
    }
    if (s_.links_missing.empty() && s_.codes_missing.empty()) break;
    if (may_read(settling_)) {
      read_missing(level);
    } else {
      // On upper levels too: who comes down from half of them may begin far from the answer.
      stats_.skipped +=
          static_cast<std::uint32_t>(s_.links_missing.size() + s_.codes_missing.size());
      s_.links_missing.clear();
      s_.codes_missing.clear();
    }
  }
}

// Inside a ReadGuard. Has the codes of the node's unvisited neighbors fetched, to be compared; when
// its links are not resident, the node joins the list of missing ones.
void Walk::expand(std::uint32_t row, const LinkLevel& level) {
  const std::byte* page = links_.touch(level.page_of(row));
  if (page == nullptr) {
    s_.links_missing.push_back(row);
    ++stats_.misses;
    return;
  }
  ++stats_.hits;
  take_neighbors(reinterpret_cast<const std::uint8_t*>(page + level.offset_of(row)), level);
  if (counting_) ++stats_.expanded;
  fetch_codes();
}

// Makes s_.neighbors the record's unvisited neighbors. Ids are checked: a page whose checksum holds
// may still have been written by somebody hostile.
void Walk::take_neighbors(const std::uint8_t* record, const LinkLevel& level) {
  std::uint16_t degree;
  std::memcpy(&degree, record, 2);
  const std::uint32_t count = std::min<std::uint32_t>(degree, level.m);
  const std::uint64_t mask = (std::uint64_t{1} << level.id_bits) - 1;
  const std::uint8_t* packed = record + 2;
  s_.neighbors.resize(count);
  std::uint32_t* out = s_.neighbors.data();
  std::uint64_t* const visited = s_.visited.data();
  std::size_t bit = 0;
  for (std::uint32_t i = 0; i < count; ++i, bit += level.id_bits) {
    std::uint64_t word;
    std::memcpy(&word, packed + (bit >> 3), 8);
    const auto id = static_cast<std::uint32_t>((word >> (bit & 7)) & mask);
    if (id >= level.count) {
      ++stats_.damaged;
      continue;
    }
    // Whether a neighbor was met before is a coin toss that no branch predictor guesses.
    const std::uint64_t seen = visited[id >> 6];
    visited[id >> 6] = seen | (std::uint64_t{1} << (id & 63));
    *out = id;
    out += ~(seen >> (id & 63)) & 1;
  }
  s_.neighbors.resize(static_cast<std::size_t>(out - s_.neighbors.data()));
  s_.visited_rows.insert(s_.visited_rows.end(), s_.neighbors.begin(), s_.neighbors.end());
}

// Inside a ReadGuard. Starts to bring the codes of s_.neighbors that are resident to the processor,
// to be compared; the others go on the list of missing codes.
void Walk::fetch_codes() {
  if (by_vectors_) return compare_vectors();
  const RecordStore& codes = codes_.records;
  for (const std::uint32_t row : s_.neighbors) {
    const std::byte* page = walked_.touch(codes.page_of(row));
    if (page == nullptr) {
      s_.codes_missing.push_back(row);
      ++stats_.misses;
      continue;
    }
    const auto* code = reinterpret_cast<const std::uint8_t*>(page + codes.offset_of(row));
    prefetch_lines(code, codes.record_bytes);
    s_.pointers.push_back(code);
    s_.pointer_rows.push_back(row);
  }
}

// Inside a ReadGuard. What fetch_codes() and compare_codes() do, of vectors: they are short, many to
// a line of the cache, and compared as they are met.
void Walk::compare_vectors() {
  for (const std::uint32_t row : s_.neighbors) {
    const std::byte* vector = vectors_.resident(row);
    if (vector == nullptr) {
      s_.codes_missing.push_back(row);
      ++stats_.misses;
      continue;
    }
    ++stats_.hits;
    if (counting_) ++stats_.evaluated;
    take(row, vectors_.distance_to(vector), 0);
  }
}

// Inside the same ReadGuard. Compares the query with the codes that were fetched.
void Walk::compare_codes() {
  const std::size_t count = s_.pointers.size();
  stats_.hits += static_cast<std::uint32_t>(count);
  if (count == 0) return;
  s_.dots.resize(count);
  codes_.dots(query_, s_.pointers.data(), count, s_.dots.data(), s_.more_dots);
  if (counting_) stats_.evaluated += static_cast<std::uint32_t>(count);
  for (std::size_t i = 0; i < count; ++i) {
    offer(s_.pointer_rows[i], s_.pointers[i], s_.dots[i]);
  }
  s_.pointers.clear();
  s_.pointer_rows.clear();
}

inline void Walk::offer(std::uint32_t row, const std::uint8_t* code, std::int32_t dot) {
  const float correction = read_f32(code + codes_.bytes);
  const float length2 = read_f32(code + codes_.bytes + 4);
  const float centred = static_cast<float>(dot) - code_offset_;
  const float product = centred * code_scale_ * correction;
  take(row, dot_factor_ * product + l2_factor_ * length2, length2);
}

// Makes a row a candidate if it is near enough. `length2`: its squared length, of a code.
inline void Walk::take(std::uint32_t row, float distance, float length2) {
  Candidate candidate;
  candidate.distance = distance;
  if (!(std::fabs(candidate.distance) < 3.0e38f)) {   // not a number, from a hostile record
    ++stats_.damaged;
    return;
  }
  const bool answers = offering_ && is_allowed(row);
  // Most candidates are too far for either list; nothing more is computed for them.
  if (!s_.nearest.takes(candidate.distance) &&
      !(answers && s_.allowed.takes(candidate.distance))) {
    return;
  }
  candidate.sigma = by_vectors_ ? 0 : sigma_factor_ * std::sqrt(std::max(length2, 0.0f));
  candidate.row = row;
  candidate.expanded = false;
  candidate.grade = grade_;
  if (s_.nearest.insert(candidate, kExpandTogether)) prefetch_links(row);
  if (answers) s_.allowed.insert(candidate);
}

// Reads in one batch every page that the walk misses, then goes on with what came.
void Walk::read_missing(const LinkLevel& level) {
  std::vector<std::uint32_t> links;
  std::vector<std::uint32_t> codes;
  links.swap(s_.links_missing);
  codes.swap(s_.codes_missing);
  s_.wanted.clear();
  for (const std::uint32_t row : links) {
    s_.wanted.push_back({layout_.links, level.page_of(row)});
  }
  for (const std::uint32_t row : codes) {
    if (by_vectors_) {
      vectors_.want(row, s_.wanted);
    } else {
      s_.wanted.push_back({codes_.records.store, codes_.records.page_of(row)});
    }
  }
  PendingPages pending =
      pool_.begin_fetch(s_.wanted.data(), s_.wanted.size(), params_.deadline);
  if (s_.flight.pending()) {
    // Before this waits for pages that others read: they may be waiting for these.
    pending.issue();
    s_.flight.land(params_.deadline);
  }
  const PinnedPages pages = pending.finish(params_.deadline);
  if (pages.reads() > 0) ++stats_.rounds;
  stats_.bytes_read += pages.bytes_read();
  stats_.pages_read += pages.bytes_read() / links_.page_bytes;
  roomy_ = pages.read_around();

  auto missed = [&](PageStatus status) {
    ++stats_.skipped;
    if (status == PageStatus::corrupt || status == PageStatus::io_error) ++stats_.damaged;
    if (status == PageStatus::deadline) stats_.deadline_hit = true;
  };
  for (std::size_t i = 0, at = links.size(); i < codes.size(); ++i) {
    if (by_vectors_) {
      const std::byte* vector = vectors_.fetched(pages, at, codes[i], missed);
      if (vector == nullptr) continue;
      if (counting_) ++stats_.evaluated;
      take(codes[i], vectors_.distance_to(vector), 0);
      continue;
    }
    const std::byte* page = pages.data(links.size() + i);
    if (page == nullptr) {
      missed(pages.status(links.size() + i));
      continue;
    }
    const auto* code =
        reinterpret_cast<const std::uint8_t*>(page + codes_.records.offset_of(codes[i]));
    std::int32_t dot;
    codes_.dots(query_, &code, 1, &dot, s_.more_dots);
    if (counting_) ++stats_.evaluated;
    offer(codes[i], code, dot);
  }
  for (std::size_t i = 0; i < links.size(); ++i) {
    const std::byte* page = pages.data(i);
    if (page == nullptr) {
      missed(pages.status(i));
      continue;
    }
    take_neighbors(reinterpret_cast<const std::uint8_t*>(page + level.offset_of(links[i])), level);
    if (counting_) ++stats_.expanded;
    const PagePool::ReadGuard guard(pool_);
    fetch_codes();
    compare_codes();
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
