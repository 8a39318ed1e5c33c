// One level of a walk: nodes are followed, their neighbors' codes compared, what is missing read.
#include <algorithm>
#include <cmath>

#include "walk.hpp"

namespace stoker {
namespace {

inline void prefetch_lines(const void* address, std::size_t bytes) {
  const char* p = static_cast<const char*>(address);
  for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
}

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
  s_.starts.swap(s_.nearest.items());
  s_.nearest.reset(ef);
  for (const Candidate& candidate : s_.starts) {
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
    if (leaves_for_ranges()) return;
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

// Inside a ReadGuard. What fetch_codes() and compare_codes() do, of vectors: they are short, many
// to a line of the cache, and compared as they are met.
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
  stats_.hits += static_cast<std::uint32_t>(s_.pointers.size());
  compare_pointers();
}

// Where the codes at s_.pointers stay meanwhile.
void Walk::compare_pointers() {
  const std::size_t count = s_.pointers.size();
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
  take(row, product_factor_ * product + length_factor_ * length2, length2);
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

// Has s_.wanted read in one round. `around`: see PagePool::begin_fetch().
PinnedPages Walk::read_round(bool around) {
  PendingPages pending =
      pool_.begin_fetch(s_.wanted.data(), s_.wanted.size(), params_.deadline, around);
  if (s_.flight.pending()) {
    // Before this waits for pages that others read: they may be waiting for these.
    pending.issue();
    s_.flight.land(params_.deadline);
  }
  PinnedPages pages = pending.finish(params_.deadline);
  if (pages.reads() > 0) ++stats_.rounds;
  stats_.bytes_read += pages.bytes_read();
  stats_.pages_read += pages.bytes_read() / links_.page_bytes;
  return pages;
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
  const PinnedPages pages = read_round(true);
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

}  // namespace stoker
