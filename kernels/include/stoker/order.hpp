// The order in which nodes are sealed, and the packing of their links.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stoker {

// Rows of a neighbor table: `counts[i]` ids at `ids + i * stride`.
struct NeighborTable {
  const std::uint32_t* ids = nullptr;
  std::size_t stride = 0;              // in ids
  const std::uint16_t* counts = nullptr;
  std::uint32_t rows = 0;
};

// Orders nodes by group (rising), and inside a group so that nodes linked to each other share
// pages of `page_nodes` nodes: a page grows from a seed by the unplaced neighbor that has most
// links into the page, and the next page starts where the last one ended. Deterministic.
// Throws BadInput when a neighbor id is out of range.
std::vector<std::uint32_t> locality_order(const NeighborTable& graph, const std::uint32_t* groups,
                                          std::uint32_t page_nodes);

// Packs rows into pages: records of u16 count and ids of `id_bits` bits, `per_page` to a page,
// the rest zero. `pages` has ceil(rows / per_page) * page_bytes zeroed bytes.
void pack_links(const NeighborTable& graph, std::uint32_t id_bits, std::uint32_t record_bytes,
                std::uint32_t per_page, std::size_t page_bytes, std::uint8_t* pages);

// The inverse: `pages` packed as above, back into `ids` (rows * m, zero beyond each count) and
// `counts`. Throws CorruptData when a count exceeds `m` or the record.
void unpack_links(const std::uint8_t* pages, std::uint32_t rows, std::uint32_t m,
                  std::uint32_t id_bits, std::uint32_t record_bytes, std::uint32_t per_page,
                  std::size_t page_bytes, std::uint32_t* ids, std::uint16_t* counts);

}  // namespace stoker
