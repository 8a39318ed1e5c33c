// One query's way through a segment: candidates and the walk over a level.
#pragma once

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "rerank.hpp"

namespace stoker {

// The codes that a walk compares: blocks of 4 bits a dimension, then blocks of 2.
class WalkCodes {
 public:
  WalkCodes(const SegmentLayout& layout, const Quantizer& quantizer, const Kernels& kernels)
      : records(layout.walk_coarse ? layout.coarse : layout.codes),
        bytes(layout.walk_coarse ? quantizer.shape().coarse_bytes : quantizer.shape().code_bytes),
        error(layout.walk_coarse ? layout.coarse_error : layout.code_error),
        grade(layout.walk_coarse ? Grade::coarse : Grade::code),
        in_basis(layout.walk_coarse && quantizer.basis().used()),
        kernels_(kernels),
        wide_blocks_(layout.walk_coarse ? quantizer.basis().wide_blocks : quantizer.shape().blocks),
        narrow_blocks_(layout.walk_coarse ? quantizer.shape().coarse_blocks - wide_blocks_ : 0) {}

  RecordStore records;
  std::size_t bytes;    // before a record's correction and squared length
  float error;          // see SegmentLayout::code_error
  Grade grade;
  bool in_basis;        // codes of a CoarseBasis

  float scale(const PreparedQuery& query) const noexcept {
    return in_basis ? query.coarse_scale8 : query.scale8;
  }
  // What a dot product of cells holds beyond that of their centred values.
  float offset(const PreparedQuery& query) const noexcept {
    if (in_basis) return query.coarse_offset;
    return (narrow_blocks_ > 0 ? 1.5f : 7.5f) * static_cast<float>(query.sum8);
  }
  // Products of the query with `count` codes, up to the offset. `more` is scratch, and so is
  // `codes`, left as it was.
  void dots(const PreparedQuery& query, const std::uint8_t** codes, std::size_t count,
            std::int32_t* out, std::vector<std::int32_t>& more) const {
    const std::int8_t* q = in_basis ? query.coarse8.data() : query.q8.data();
    if (wide_blocks_ > 0) kernels_.dot_code4(q, wide_blocks_, codes, count, out);
    if (narrow_blocks_ == 0) return;
    if (wide_blocks_ == 0) {
      kernels_.dot_code2(q, narrow_blocks_, codes, count, out);
      return;
    }
    more.resize(count);
    for (std::size_t i = 0; i < count; ++i) codes[i] += wide_blocks_ * kBlockBytes;
    kernels_.dot_code2(q + wide_blocks_ * kBlockDims, narrow_blocks_, codes, count, more.data());
    for (std::size_t i = 0; i < count; ++i) {
      codes[i] -= wide_blocks_ * kBlockBytes;
      out[i] += more[i];
    }
  }

 private:
  const Kernels& kernels_;
  std::size_t wide_blocks_;
  std::size_t narrow_blocks_;
};

// The nearest `capacity` candidates in order, and a cursor at the first one not yet expanded.
class CandidateList {
 public:
  void reset(std::size_t capacity) {
    capacity_ = capacity;
    items_.clear();
    items_.reserve(capacity + 1);
    cursor_ = 0;
  }
  bool takes(float distance) const {
    return items_.size() < capacity_ || distance < items_.back().distance;
  }
  // Returns whether the candidate is now among the first `soon` from the cursor on.
  bool insert(const Candidate& candidate, std::size_t soon = 0) {
    if (!takes(candidate.distance)) return false;
    std::size_t low = 0;
    std::size_t high = items_.size();
    while (low < high) {
      const std::size_t middle = (low + high) / 2;
      if (items_[middle].distance <= candidate.distance) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (items_.size() == capacity_) items_.pop_back();
    items_.insert(items_.begin() + static_cast<std::ptrdiff_t>(low), candidate);
    if (low < cursor_) cursor_ = low;
    return low < cursor_ + soon;
  }
  // The nearest candidate not yet expanded, now marked; nullptr when there is none.
  const Candidate* next() {
    while (cursor_ < items_.size() && items_[cursor_].expanded) ++cursor_;
    if (cursor_ == items_.size()) return nullptr;
    items_[cursor_].expanded = true;
    return &items_[cursor_];
  }
  // Calls `look` with up to `count` candidates that come next, in order.
  template <typename Look>
  void peek_next(std::size_t count, const Look& look) const {
    for (std::size_t i = cursor_; i < items_.size() && count > 0; ++i) {
      if (items_[i].expanded) continue;
      look(items_[i]);
      --count;
    }
  }
  std::vector<Candidate>& items() noexcept { return items_; }
  const std::vector<Candidate>& items() const noexcept { return items_; }

 private:
  std::vector<Candidate> items_;
  std::size_t capacity_ = 0;
  std::size_t cursor_ = 0;
};

// Rows of a group that share a page of codes.
struct RowsOfPage {
  std::uint32_t group;   // its place among those that are scanned
  std::uint32_t page;    // among those that are wanted
  std::uint32_t first;
  std::uint32_t last;    // one past the last
};

// The table of groups, in memory, and its groups in the order in which they lie from a query.
class NearestGroups {
 public:
  NearestGroups(const SegmentLayout& layout, const Quantizer& quantizer, const Kernels& kernels)
      : table_(layout.ranges), layout_(layout), quantizer_(quantizer), kernels_(kernels) {}

  // The pages of the table, for take().
  void want(PagePool& pool, std::vector<PageRef>& wanted) const;
  // Puts the `most` nearest groups in order, of those whose pages came. Returns how many did not.
  std::size_t take(PinnedPages pages, const PreparedQuery& query, std::size_t most);

  std::size_t size() const noexcept { return order_.size(); }
  std::uint32_t at(std::size_t place) const noexcept { return order_[place].second; }
  // Calls `look` with the first and one past the last row of each piece that is to be looked at.
  // False where the table says what no writer writes, or its pages did not come; then nothing is.
  template <typename Look>
  bool each_piece(std::size_t place, const Look& look);

 private:
  const std::uint8_t* record(std::uint32_t group) const noexcept;

  const RangeTable& table_;
  const SegmentLayout& layout_;
  const Quantizer& quantizer_;
  const Kernels& kernels_;
  PinnedPages pages_;
  std::vector<std::pair<float, std::uint32_t>> order_;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> pieces_;   // of one group: first row, rows
};

struct Searcher::Scratch {
  CandidateList nearest;       // drives the walk
  CandidateList allowed;       // answers, when a filter keeps some nodes out of them
  std::vector<Candidate> entries;   // where the walk before entered the bottom
  std::vector<Candidate> kept;      // what it ended with
  std::vector<std::uint64_t> visited;         // bit per row
  std::vector<std::uint32_t> visited_rows;    // to clear the bits again
  std::vector<std::uint32_t> links_missing;   // rows whose links page is absent
  std::vector<std::uint32_t> codes_missing;   // rows whose codes page is absent
  std::vector<Candidate> starts;              // where a level is entered
  std::vector<std::uint32_t> neighbors;
  std::vector<const std::uint8_t*> pointers;
  std::vector<std::uint32_t> pointer_rows;
  std::vector<std::int32_t> dots;
  std::vector<std::int32_t> more_dots;
  std::vector<PageRef> wanted;
  std::vector<RowsOfPage> spans;              // of a scan of groups
  std::vector<std::unique_ptr<Settling>> spare;   // of queries that are settled
  PendingPages flight;    // what other queries of the batch wait for
};

class Walk {
 public:
  // Leaves what it finds in `settling`.
  Walk(Searcher& searcher, Searcher::Scratch& scratch, Settling& settling);

  void run(const float* query);

 private:
  void walk(std::size_t ef);
  void descend(std::size_t entry_ef);
  void enter_widely(std::uint32_t entry_ef);
  float nearness() const;
  bool is_near() const;
  std::uint32_t farther_band() const;
  void go_farther();
  bool covers_answer(std::size_t among) const;
  void widen(std::size_t ef);
  void begin_anew();
  void walk_level(std::uint32_t level_number, std::size_t ef, bool bottom);
  void expand(std::uint32_t row, const LinkLevel& level);
  void take_neighbors(const std::uint8_t* record, const LinkLevel& level);
  void fetch_codes();
  void compare_codes();
  void compare_pointers();
  void compare_vectors();
  void prefetch_links(std::uint32_t row) const;
  void offer(std::uint32_t row, const std::uint8_t* code, std::int32_t dot);
  void take(std::uint32_t row, float distance, float length2);
  void read_missing(const LinkLevel& level);
  std::uint32_t ahead_max(std::size_t ef) const;
  void scan_allowed();
  bool scan_ranges();
  bool scan_groups(NearestGroups& groups, std::size_t from, std::size_t to);
  bool walk_instead();
  PinnedPages read_round(bool around);
  bool leaves_for_ranges();

  bool is_allowed(std::uint32_t row) const {
    return params_.allow == nullptr || ((params_.allow[row >> 3] >> (row & 7)) & 1) != 0;
  }
  bool visit(std::uint32_t row) {
    std::uint64_t& word = s_.visited[row >> 6];
    const std::uint64_t bit = std::uint64_t{1} << (row & 63);
    if ((word & bit) != 0) return false;
    word |= bit;
    s_.visited_rows.push_back(row);
    return true;
  }
  void forget_visited();

  Searcher& searcher_;
  Searcher::Scratch& s_;
  Settling& settling_;
  SearchParams& params_;
  PreparedQuery& query_;
  QueryStats& stats_;
  const SegmentLayout& layout_;
  PagePool& pool_;
  PagePool::View links_;
  WalkCodes codes_;
  FullVectors vectors_;
  bool by_vectors_;   // what the walk compares are not codes, but vectors
  Grade grade_;       // of what it compares
  PagePool::View walked_;   // pages of the codes that the walk compares
  float product_factor_ = 0;   // see PreparedQuery
  float length_factor_ = 0;
  float code_offset_ = 0;    // see WalkCodes
  float code_scale_ = 0;
  float sigma_factor_ = 0;   // deviation of a first plane's estimate over the vector's length
  const LinkLevel* level_ = nullptr;   // that is walked
  bool filtered_;
  bool counting_ = false;   // whether this level's work counts in the statistics: the bottom's
  bool offering_ = false;   // whether nodes met now may be answers to the filter
  bool roomy_ = false;      // whether the last read found frames idle, and time
  bool left_ = false;       // whether the walk has missed a page and a scan of groups follows
};

}  // namespace stoker
