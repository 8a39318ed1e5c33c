#include <cmath>
#include <limits>
#include <new>
#include <string>

#include "stoker/errors.hpp"
#include "walk.hpp"

namespace stoker {

Searcher::Searcher(PagePool& pool, const SegmentLayout& layout, const Quantizer& quantizer)
    : pool_(pool), layout_(layout), quantizer_(quantizer), kernels_(kernels()) {
  const CodeShape& shape = quantizer.shape();
  auto need = [](bool holds, const std::string& what) {
    if (!holds) throw CorruptData("segment layout: " + what);
  };
  need(layout.dim == quantizer.dim(), "dimension differs from the quantizer's");
  need(layout.metric == Metric::inner_product || quantizer.row_length2() == 0,
       "a length of rows, but no inner products");
  need(!layout.levels.empty(), "no bottom level");
  need(layout.levels[0].count == layout.count, "bottom level does not hold every row");
  need(layout.count == 0 || layout.entry_row < layout.levels.back().count,
       "entry point is not on the top level");
  need(layout.codes.record_bytes == shape.code_record_bytes, "code record size");
  need(layout.refine.record_bytes == shape.refine_record_bytes, "refinement record size");
  need(!layout.walk_coarse || layout.coarse.record_bytes == shape.coarse_record_bytes,
       "coarse record size");
  need(layout.vectors.record_bytes == layout.dim * (layout.vectors.half ? 2u : 4u),
       "vector record size");
  auto fits = [&](const PagePool::View& view, std::uint64_t last_page_exclusive,
                  std::size_t used_bytes, const char* what) {
    need(used_bytes <= view.page_bytes, std::string(what) + " records do not fit a page");
    need(last_page_exclusive <= view.page_count, std::string(what) + " store has too few pages");
  };
  std::uint32_t below = layout.count;
  for (const LinkLevel& level : layout.levels) {
    need(level.id_bits >= 1 && level.id_bits <= 32, "id width");
    need(level.count <= below, "a higher level has more nodes than the one under it");
    below = level.count;
    need(level.m <= 65535 &&
             level.record_bytes >= 2 + (static_cast<std::uint64_t>(level.m) * level.id_bits + 7) / 8,
         "link record size");
    if (level.count > 0) {
      // In 64 bits: a first page near 2^32 would come out as a small one.
      fits(pool.view(layout.links),
           std::uint64_t{level.first_page} + level.per_page.quotient(level.count - 1) + 1,
           static_cast<std::size_t>(level.per_page.value()) * level.record_bytes + 8, "link");
    }
  }
  if (layout.count > 0) {
    const auto pages = [&](const RecordStore& store) {
      return std::uint64_t{store.page_of(layout.count - 1)} + 1;
    };
    fits(pool.view(layout.codes.store), pages(layout.codes),
         static_cast<std::size_t>(layout.codes.per_page.value()) * layout.codes.record_bytes,
         "code");
    if (layout.walk_coarse) {
      fits(pool.view(layout.coarse.store), pages(layout.coarse),
           static_cast<std::size_t>(layout.coarse.per_page.value()) * layout.coarse.record_bytes,
           "coarse code");
    }
    fits(pool.view(layout.refine.store), pages(layout.refine),
         static_cast<std::size_t>(layout.refine.per_page.value()) * layout.refine.record_bytes,
         "refinement");
    if (layout.ranges.groups > 0) {
      const RangeTable& table = layout.ranges;
      const PagePool::View view = pool.view(table.store);
      const std::uint64_t per_page = view.page_bytes / RangeTable::kPieceBytes;
      need(table.record_bytes == shape.code_record_bytes + RangeTable::kTailBytes,
           "group record size");
      fits(view,
           std::uint64_t{table.per_page.quotient(table.groups - 1)} + 1 +
               (table.pieces + per_page - 1) / per_page,
           static_cast<std::size_t>(table.per_page.value()) * table.record_bytes, "group");
    }
    const PagePool::View vectors = pool.view(layout.vectors.store);
    const std::uint64_t bytes = std::uint64_t{layout.count} * layout.vectors.record_bytes;
    fits(vectors, (bytes + vectors.page_bytes - 1) / vectors.page_bytes, 0, "vector");
  }
}

Searcher::~Searcher() = default;

std::unique_ptr<Searcher::Scratch> Searcher::take_scratch() {
  const std::lock_guard<std::mutex> lock(scratch_mutex_);
  if (scratch_.empty()) return std::make_unique<Scratch>();
  std::unique_ptr<Scratch> taken = std::move(scratch_.back());
  scratch_.pop_back();
  return taken;
}

void Searcher::give_scratch(std::unique_ptr<Scratch> scratch) {
  const std::lock_guard<std::mutex> lock(scratch_mutex_);
  scratch_.push_back(std::move(scratch));
}

QueryStats Searcher::search(const float* query, const SearchParams& params, std::uint32_t* rows,
                            float* scores) {
  return Session(*this).search(query, params, rows, scores);
}

std::size_t Searcher::vectors(const std::uint32_t* rows, std::size_t count, float* out) {
  const PagePool::View view = pool_.view(layout_.vectors.store);
  const std::size_t record = layout_.vectors.record_bytes;
  std::vector<std::byte> bytes(record);
  std::vector<PageRef> wanted;
  std::size_t lost = 0;
  constexpr std::size_t kBatch = 64;   // pages of one read batch stay pinned together
  for (std::size_t start = 0; start < count; start += kBatch) {
    const std::size_t stop = std::min(count, start + kBatch);
    wanted.clear();
    for (std::size_t i = start; i < stop; ++i) {
      if (rows[i] >= layout_.count) {
        throw BadInput("row " + std::to_string(rows[i]) + " of " + std::to_string(layout_.count));
      }
      const std::uint64_t at = std::uint64_t{rows[i]} * record;
      for (std::uint64_t p = at / view.page_bytes; p <= (at + record - 1) / view.page_bytes; ++p) {
        wanted.push_back({layout_.vectors.store, static_cast<PageNumber>(p)});
      }
    }
    const PinnedPages pages = pool_.fetch(wanted.data(), wanted.size());
    std::size_t next = 0;
    for (std::size_t i = start; i < stop; ++i) {
      const std::uint64_t at = std::uint64_t{rows[i]} * record;
      std::size_t offset = at % view.page_bytes;
      std::size_t done = 0;
      bool whole = true;
      while (done < record) {
        const std::byte* page = pages.data(next++);
        const std::size_t part = std::min(view.page_bytes - offset, record - done);
        if (page == nullptr) {
          whole = false;
        } else {
          std::memcpy(bytes.data() + done, page + offset, part);
        }
        done += part;
        offset = 0;
      }
      float* target = out + i * layout_.dim;
      if (!whole) {
        ++lost;
        std::fill(target, target + layout_.dim, std::numeric_limits<float>::quiet_NaN());
      } else if (layout_.vectors.half) {
        for (std::uint32_t d = 0; d < layout_.dim; ++d) {
          std::uint16_t half;
          std::memcpy(&half, bytes.data() + d * 2, 2);
          target[d] = half_to_float(half);
        }
      } else {
        std::memcpy(target, bytes.data(), record);
      }
    }
  }
  return lost;
}

void Searcher::estimate_errors(const float* query, const std::uint32_t* rows, std::size_t count,
                               float* walk_error, float* refine_error) {
  PreparedQuery prepared;
  prepare_query(quantizer_, query, layout_.metric == Metric::l2, prepared);
  std::vector<float> exact(static_cast<std::size_t>(layout_.dim));
  const CodeShape& shape = quantizer_.shape();
  const WalkCodes codes(layout_, quantizer_, kernels_);
  std::vector<std::int32_t> more;
  for (std::size_t i = 0; i < count; ++i) {
    vectors(rows + i, 1, exact.data());
    // <q', x - centre>, q' being what the centre leaves of the query.
    double product = 0;
    double length2 = 0;
    double whole2 = 0;
    for (std::uint32_t d = 0; d < layout_.dim; ++d) {
      const double centre = quantizer_.centre()[d];
      const double x = exact[d] - centre;
      product += (prepared.original[d] - prepared.shift * centre) * x;
      length2 += x * x;
      whole2 += static_cast<double>(exact[d]) * exact[d];
    }
    // As records state it.
    if (quantizer_.row_length2() > 0) length2 += quantizer_.row_length2() - whole2;
    const PageRef wanted[] = {{codes.records.store, codes.records.page_of(rows[i])},
                              {layout_.codes.store, layout_.codes.page_of(rows[i])},
                              {layout_.refine.store, layout_.refine.page_of(rows[i])}};
    const PinnedPages pages = pool_.fetch(wanted, 3);
    walk_error[i] = refine_error[i] = std::numeric_limits<float>::quiet_NaN();
    if (pages.data(0) == nullptr || pages.data(1) == nullptr || pages.data(2) == nullptr) continue;
    const auto record = [&](std::size_t page, const RecordStore& store) {
      return reinterpret_cast<const std::uint8_t*>(pages.data(page) + store.offset_of(rows[i]));
    };
    const std::uint8_t* walked = record(0, codes.records);
    const std::uint8_t* high = record(1, layout_.codes);
    const std::uint8_t* low = record(2, layout_.refine);
    float correction;
    float refined;
    std::memcpy(&correction, walked + codes.bytes, 4);
    std::memcpy(&refined, low + shape.code_bytes, 4);
    std::int32_t dot;
    codes.dots(prepared, &walked, 1, &dot, more);
    const std::int64_t dot8 = kernels_.dot_code8(prepared.q16.data(), shape.blocks, high, low);
    const double scale = prepared.length * std::sqrt(length2);
    if (!(scale > 0)) continue;
    const double from_code = (dot - static_cast<double>(codes.offset(prepared))) *
                             static_cast<double>(codes.scale(prepared)) * correction;
    const double from_both = static_cast<double>(dot8) * static_cast<double>(prepared.scale16) *
                             refined;
    walk_error[i] = static_cast<float>((from_code - product) / scale);
    refine_error[i] = static_cast<float>((from_both - product) / scale);
  }
}

}  // namespace stoker
