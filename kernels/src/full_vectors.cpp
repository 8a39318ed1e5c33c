// Full vectors over pages, which they cross wherever they fall.
#include <cmath>

#include "rerank.hpp"

namespace stoker {

float FullVectors::distance_to(const std::byte* vector) const {
  const float* q = s_.query.original.data();
  const std::size_t dim = layout_.dim;
  if (layout_.metric == Metric::l2) {
    const float d = layout_.vectors.half
                        ? kernels_.l2_f16(q, reinterpret_cast<const std::uint16_t*>(vector), dim)
                        : kernels_.l2_f32(q, reinterpret_cast<const float*>(vector), dim);
    return d - s_.offset;
  }
  if (layout_.walk_vectors) return static_cast<float>(behind_query(vector));
  const float d = layout_.vectors.half
                      ? kernels_.dot_f16(q, reinterpret_cast<const std::uint16_t*>(vector), dim)
                      : kernels_.dot_f32(q, reinterpret_cast<const float*>(vector), dim);
  return -(d - s_.offset);
}

// By how much a vector's inner product with the query is less than the query's length: nothing for
// the query itself at unit length. In doubles, since among many rows of few dimensions a query's
// neighbors have products that floats round to one; and of unit rows, whose lengths are rounded
// too, by the cosine.
double FullVectors::behind_query(const std::byte* vector) const {
  double product = 0;
  double length2 = 0;
  for (std::size_t d = 0; d < layout_.dim; ++d) {
    float value;
    if (layout_.vectors.half) {
      std::uint16_t half;
      std::memcpy(&half, vector + 2 * d, 2);
      value = half_to_float(half);
    } else {
      std::memcpy(&value, vector + 4 * d, 4);
    }
    product += static_cast<double>(s_.query.original[d]) * value;
    length2 += static_cast<double>(value) * value;
  }
  if (layout_.unit_rows && length2 > 0) product /= std::sqrt(length2);
  return s_.query_length - product;
}

void FullVectors::prefetch(std::uint32_t row) const {
  const std::size_t page_bytes = pages_.page_bytes;
  const std::size_t record = layout_.vectors.record_bytes;
  const std::uint64_t start = static_cast<std::uint64_t>(row) * record;
  std::size_t offset = start % page_bytes;
  std::size_t left = record;
  for (auto page = static_cast<PageNumber>(start / page_bytes); left > 0; ++page, offset = 0) {
    const std::byte* bytes = pages_.peek(page);
    const std::size_t part = std::min(left, page_bytes - offset);
    if (bytes == nullptr) return;
    for (std::size_t at = 0; at < part; at += 64) __builtin_prefetch(bytes + offset + at);
    left -= part;
  }
}

const std::byte* FullVectors::resident(std::uint32_t row) const {
  const std::size_t page_bytes = pages_.page_bytes;
  const std::size_t record = layout_.vectors.record_bytes;
  const std::uint64_t start = static_cast<std::uint64_t>(row) * record;
  const auto first = static_cast<PageNumber>(start / page_bytes);
  const auto last = static_cast<PageNumber>((start + record - 1) / page_bytes);
  const std::size_t offset = start % page_bytes;
  const std::byte* page = pages_.touch(first);
  if (page == nullptr || first == last) return page == nullptr ? nullptr : page + offset;
  s_.vector.resize((record + 3) / 4);
  auto* out = reinterpret_cast<std::byte*>(s_.vector.data());
  std::size_t done = page_bytes - offset;
  std::memcpy(out, page + offset, done);
  for (PageNumber next = first + 1; next <= last; ++next) {
    const std::byte* more = pages_.touch(next);
    if (more == nullptr) return nullptr;
    const std::size_t part = std::min(page_bytes, record - done);
    std::memcpy(out + done, more, part);
    done += part;
  }
  return out;
}

void FullVectors::want(std::uint32_t row, std::vector<PageRef>& wanted) const {
  const std::size_t record = layout_.vectors.record_bytes;
  const std::uint64_t start = static_cast<std::uint64_t>(row) * record;
  const std::uint64_t last = (start + record - 1) / pages_.page_bytes;
  for (std::uint64_t page = start / pages_.page_bytes; page <= last; ++page) {
    wanted.push_back({layout_.vectors.store, static_cast<PageNumber>(page)});
  }
}

}  // namespace stoker
