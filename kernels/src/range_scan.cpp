// A scan of the groups of rows that lie nearest, for a query whose walk misses a page.
//
// A walk that has to read waits for the device step after step, some ten times before it is warm. The
// table of groups tells beforehand where rows near the query lie: their codes come in one round.
#include <algorithm>
#include <cmath>

#include "walk.hpp"

namespace stoker {
namespace {

// Rows beyond twice the answer that a scan keeps until they are settled; what it drops is lost, and no
// expectation says so. Twice as many by 2 bits: a query that lies far from all rows mistakes more of
// their order. Of such ones on 20,000 x 96 the true 100 were found to 0.91 for 0.80.
constexpr std::size_t kSpare = 100;
// With a deadline so many groups are read at a time, the nearest first: what came in time is then of
// use, whatever did not.
constexpr std::size_t kGroupsHurried = 8;
// Share of the rows that a filter has to allow: of outdated rows a segment has no more before it is
// merged.
constexpr double kAllowedMin = 0.7;
// Codes that are compared together.
constexpr std::size_t kTogether = 256;

std::uint32_t read_u32(const std::uint8_t* p) {
  std::uint32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

std::uint32_t pages_for(std::uint32_t records, std::uint32_t per_page) {
  return records / per_page + (records % per_page > 0 ? 1 : 0);
}

}  // namespace

// ---- NearestGroups -----------------------------------------------------------------------------

void NearestGroups::want(PagePool& pool, std::vector<PageRef>& wanted) const {
  const auto per_page =
      static_cast<std::uint32_t>(pool.view(table_.store).page_bytes / RangeTable::kPieceBytes);
  const PageNumber pages =
      pages_for(table_.groups, table_.per_page.value()) + pages_for(table_.pieces, per_page);
  for (PageNumber page = 0; page < pages; ++page) wanted.push_back({table_.store, page});
}

const std::uint8_t* NearestGroups::record(std::uint32_t group) const noexcept {
  const std::uint32_t page = table_.per_page.quotient(group);
  const std::byte* bytes = pages_.data(page);
  if (bytes == nullptr) return nullptr;
  return reinterpret_cast<const std::uint8_t*>(bytes) +
         static_cast<std::size_t>(group - page * table_.per_page.value()) * table_.record_bytes;
}

std::size_t NearestGroups::take(PinnedPages pages, const PreparedQuery& query, std::size_t most) {
  pages_ = std::move(pages);
  order_.clear();
  const CodeShape& shape = quantizer_.shape();
  const float offset = 7.5f * static_cast<float>(query.sum8);
  std::vector<const std::uint8_t*> codes;
  std::vector<std::uint32_t> groups;
  std::vector<std::int32_t> dots(kTogether);
  std::size_t lost = 0;
  const auto compare = [&] {
    if (codes.empty()) return;
    kernels_.dot_code4(query.q8.data(), shape.blocks, codes.data(), codes.size(), dots.data());
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const float correction = read_f32(codes[i] + shape.code_bytes);
      const float product =
          (static_cast<float>(dots[i]) - offset) * query.scale8 * correction;
      const float distance = query.product_factor * product +
                             query.length_factor * read_f32(codes[i] + shape.code_bytes + 4);
      if (std::fabs(distance) < 3.0e38f) {
        order_.emplace_back(distance, groups[i]);
      } else {
        ++lost;   // from a hostile record
      }
    }
    codes.clear();
    groups.clear();
  };
  for (std::uint32_t group = 0; group < table_.groups; ++group) {
    const std::uint8_t* code = record(group);
    if (code == nullptr) {
      ++lost;
      continue;
    }
    codes.push_back(code);
    groups.push_back(group);
    if (codes.size() == kTogether) compare();
  }
  compare();
  const std::size_t kept = std::min(most, order_.size());
  std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(kept),
                    order_.end());
  order_.resize(kept);
  return lost;
}

template <typename Look>
bool NearestGroups::each_piece(std::size_t place, const Look& look) {
  const std::uint8_t* tail = record(at(place)) + quantizer_.shape().code_record_bytes;
  const std::uint32_t first = read_u32(tail);
  const std::uint32_t count = read_u32(tail + 4);
  if (count == 0 || first > table_.pieces || count > table_.pieces - first) return false;
  const auto per_page = static_cast<std::uint32_t>(pages_.page_bytes() / RangeTable::kPieceBytes);
  const std::uint32_t piece_page = pages_for(table_.groups, table_.per_page.value());
  std::uint32_t left = RangeTable::kRowsMax;
  pieces_.clear();
  for (std::uint32_t piece = first; piece < first + count; ++piece) {
    const std::byte* page = pages_.data(piece_page + piece / per_page);
    if (page == nullptr) return false;
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(page) +
                        static_cast<std::size_t>(piece % per_page) * RangeTable::kPieceBytes;
    const std::uint32_t row = read_u32(bytes);
    const std::uint32_t rows = read_u32(bytes + 4);
    if (rows == 0 || rows > left || row > layout_.count || rows > layout_.count - row) return false;
    left -= rows;
    pieces_.emplace_back(row, rows);
  }
  const std::uint32_t all = RangeTable::kRowsMax - left;
  for (const auto& [row, rows] : pieces_) {
    const bool is_small = place >= table_.whole_nearest && rows * table_.small_share < all;
    if (!is_small) look(row, row + rows);
  }
  return true;
}

// ---- Walk --------------------------------------------------------------------------------------

// After a miss: whether the walk ends here, since a scan of groups takes its place. Not under a filter
// that takes many rows out: what it leaves of the nearest groups may be too little. Nor where frames
// are short: what a scan brings would drive out what walks need.
bool Walk::leaves_for_ranges() {
  if (params_.range_groups == 0 || layout_.ranges.groups == 0 || !may_read(settling_)) return false;
  if (filtered_ && static_cast<double>(params_.allow_count) <
                       kAllowedMin * static_cast<double>(layout_.count)) {
    return false;
  }
  if (params_.range_hurried && !params_.deadline) return false;
  if (!pool_.is_roomy()) return false;
  s_.links_missing.clear();
  s_.codes_missing.clear();
  left_ = true;
  return true;
}

// Looks at the rows of the nearest groups in place of a walk. One that ends far from the query, by
// what it has met, goes on to more of them, as walks do. False where nobody knows which are nearest,
// or a filter left too few of their rows to be sure of the answer: then the walk begins anew.
bool Walk::scan_ranges() {
  forget_visited();
  // What was walked promises nothing, but it may be all that there is in time.
  std::vector<Candidate> walked(s_.nearest.items());
  if (filtered_) {
    walked.insert(walked.end(), s_.allowed.items().begin(), s_.allowed.items().end());
  }
  stats_.expanded = stats_.evaluated = 0;
  stats_.narrow = false;
  stats_.farther = 0;
  const std::size_t sure = 2 * std::size_t{params_.k} + kSpare;
  const std::size_t kept = sure * (layout_.walk_coarse ? 2 : 1);
  s_.nearest.reset(kept);
  s_.allowed.reset(kept);
  level_ = &layout_.levels[0];
  offering_ = filtered_;
  counting_ = true;

  std::size_t most = params_.range_groups;
  for (std::uint32_t i = 0; i < params_.farther_count; ++i) {
    most = std::max<std::size_t>(most, params_.farther[i].range_groups);
  }
  NearestGroups groups(layout_, searcher_.quantizer_, searcher_.kernels_);
  s_.wanted.clear();
  groups.want(pool_, s_.wanted);
  PinnedPages table = read_round(false);
  for (std::size_t i = 0; i < table.size(); ++i) {
    const PageStatus status = table.status(i);
    if (status == PageStatus::deadline) stats_.deadline_hit = true;
    if (status == PageStatus::corrupt || status == PageStatus::io_error) ++stats_.damaged;
  }
  const std::size_t lost = groups.take(std::move(table), query_, most);
  if (lost > 0 && may_read(settling_)) return false;
  stats_.skipped += static_cast<std::uint32_t>(lost);

  std::size_t wanted = params_.range_groups;
  bool sound = scan_groups(groups, 0, wanted);
  const std::uint32_t band = farther_band();
  if (band > 0 && params_.farther[band - 1].range_groups > wanted) {
    sound = scan_groups(groups, wanted, params_.farther[band - 1].range_groups) && sound;
    wanted = params_.farther[band - 1].range_groups;
  }
  if (!sound && may_read(settling_)) return walk_instead();
  for (const Candidate& candidate : walked) {
    if (!visit(candidate.row)) continue;
    s_.nearest.insert(candidate);
    if (filtered_ && is_allowed(candidate.row)) s_.allowed.insert(candidate);
  }
  // Groups that are not in order promise nothing.
  if (lost > 0) stats_.ranges_whole = 0;
  if (filtered_ && !covers_answer(sure)) {
    if (may_read(settling_)) return walk_instead();
    stats_.ranges_whole = 0;
    ++stats_.skipped;
  }
  stats_.range_groups = static_cast<std::uint32_t>(wanted);
  params_.mean_loss = params_.range_mean_loss;
  params_.rerank_target = params_.range_rerank_target;
  params_.line = LossLine();
  return true;
}

// False, for a walk that takes the place of what was scanned.
bool Walk::walk_instead() {
  forget_visited();
  stats_.evaluated = stats_.ranges_whole = 0;
  return false;
}

// Compares the query with the rows of groups, those from the `from`-th nearest on. False where the
// table does not say which rows a group has: nobody can tell how much of the answer is in it.
bool Walk::scan_groups(NearestGroups& groups, std::size_t from, std::size_t to) {
  to = std::min(to, groups.size());
  const RecordStore& codes = codes_.records;
  const std::size_t step = params_.deadline ? kGroupsHurried : groups.size();
  bool all_sound = true;
  for (std::size_t start = from; start < to; start += step) {
    const std::size_t stop = std::min(to, start + step);
    s_.wanted.clear();
    s_.spans.clear();
    std::uint32_t rows_in_all = 0;
    std::size_t first_broken = stop;
    for (std::size_t place = start; place < stop; ++place) {
      const bool sound = groups.each_piece(place, [&](std::uint32_t first, std::uint32_t last) {
        rows_in_all += last - first;
        for (std::uint32_t row = first; row < last;) {
          const PageNumber page = codes.page_of(row);
          const auto next = static_cast<std::uint32_t>(
              std::min<std::uint64_t>(last, (page + std::uint64_t{1}) * codes.per_page.value()));
          if (s_.wanted.empty() || s_.wanted.back().page != page) {
            s_.wanted.push_back({codes.store, page});
          }
          s_.spans.push_back({static_cast<std::uint32_t>(place),
                              static_cast<std::uint32_t>(s_.wanted.size() - 1), row, next});
          row = next;
        }
      });
      if (sound) continue;
      ++stats_.damaged;
      stats_.skipped += layout_.count / layout_.ranges.groups;   // as many as groups have in the mean
      all_sound = false;
      first_broken = std::min(first_broken, place);
    }
    if (!may_read(settling_)) {
      stats_.skipped += rows_in_all;
      continue;
    }
    const PinnedPages pages = read_round(false);
    for (const RowsOfPage& span : s_.spans) {
      const std::byte* page = pages.data(span.page);
      const std::uint32_t rows = span.last - span.first;
      (pages.is_read(span.page) || page == nullptr ? stats_.misses : stats_.hits) += rows;
      if (page == nullptr) {
        const PageStatus status = pages.status(span.page);
        stats_.skipped += rows;
        if (status == PageStatus::deadline) stats_.deadline_hit = true;
        if (status == PageStatus::corrupt || status == PageStatus::io_error) ++stats_.damaged;
        first_broken = std::min<std::size_t>(first_broken, span.group);
        continue;
      }
      for (std::uint32_t row = span.first; row < span.last; ++row) {
        if (!visit(row)) continue;   // a hostile table may have it in two groups
        s_.pointers.push_back(
            reinterpret_cast<const std::uint8_t*>(page + codes.offset_of(row)));
        s_.pointer_rows.push_back(row);
      }
      if (s_.pointers.size() >= kTogether) compare_pointers();
    }
    compare_pointers();
    if (stats_.ranges_whole == start) {
      stats_.ranges_whole = static_cast<std::uint32_t>(first_broken);
    }
  }
  return all_sound;
}

// ---- Searcher ----------------------------------------------------------------------------------

void Searcher::nearest_groups(const float* query, std::size_t count, std::uint32_t* out) {
  std::fill(out, out + count, kNoRow);
  if (layout_.ranges.groups == 0) return;
  PreparedQuery prepared;
  prepare_query(quantizer_, query, layout_.metric == Metric::l2, prepared);
  NearestGroups groups(layout_, quantizer_, kernels_);
  std::vector<PageRef> wanted;
  groups.want(pool_, wanted);
  groups.take(pool_.fetch(wanted.data(), wanted.size()), prepared, count);
  for (std::size_t i = 0; i < groups.size(); ++i) out[i] = groups.at(i);
}

}  // namespace stoker
