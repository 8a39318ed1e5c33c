#include "stoker/order.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <unordered_map>

#include "stoker/errors.hpp"

namespace stoker {

std::vector<std::uint32_t> locality_order(const NeighborTable& graph, const std::uint32_t* groups,
                                          std::uint32_t page_nodes) {
  const std::uint32_t n = graph.rows;
  std::vector<std::uint32_t> seeds(n);
  std::iota(seeds.begin(), seeds.end(), 0u);
  std::stable_sort(seeds.begin(), seeds.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return groups[a] < groups[b]; });
  std::vector<std::uint32_t> order;
  order.reserve(n);
  std::vector<bool> placed(n, false);
  // Unplaced nodes of the current group that are linked from the page, with their link counts.
  std::vector<std::uint32_t> frontier;
  std::unordered_map<std::uint32_t, std::uint32_t> links;
  std::size_t seed_at = 0;
  const std::uint32_t capacity = std::max(page_nodes, 1u);

  auto place = [&](std::uint32_t node, std::uint32_t group) {
    placed[node] = true;
    order.push_back(node);
    const std::uint32_t* ids = graph.ids + static_cast<std::size_t>(node) * graph.stride;
    for (std::uint16_t j = 0; j < graph.counts[node]; ++j) {
      const std::uint32_t id = ids[j];
      if (id >= n) {
        throw BadInput("node " + std::to_string(node) + " links to " + std::to_string(id) +
                       ", but there are " + std::to_string(n) + " nodes");
      }
      if (placed[id] || groups[id] != group) continue;
      if (links[id]++ == 0) frontier.push_back(id);
    }
  };

  while (order.size() < n) {
    // The best leftover of the last page carries its neighborhood on; else the next seed.
    std::uint32_t start = 0;
    bool found = false;
    std::uint32_t best = 0;
    for (const std::uint32_t id : frontier) {
      if (!placed[id] && links[id] > best) {
        best = links[id];
        start = id;
        found = true;
      }
    }
    if (!found) {
      while (placed[seeds[seed_at]]) ++seed_at;
      start = seeds[seed_at];
    }
    const std::uint32_t group = groups[start];
    // All nodes of lower groups are placed before any of a higher one.
    frontier.clear();
    links.clear();
    place(start, group);
    for (std::uint32_t filled = 1; filled < capacity && order.size() < n; ++filled) {
      std::size_t pick = frontier.size();
      std::uint32_t most = 0;
      std::size_t kept = 0;
      for (std::size_t i = 0; i < frontier.size(); ++i) {
        if (placed[frontier[i]]) continue;
        frontier[kept] = frontier[i];
        const std::uint32_t count = links[frontier[kept]];
        if (count > most) {
          most = count;
          pick = kept;
        }
        ++kept;
      }
      frontier.resize(kept);
      if (most == 0) break;
      place(frontier[pick], group);
    }
  }
  return order;
}

void pack_links(const NeighborTable& graph, std::uint32_t id_bits, std::uint32_t record_bytes,
                std::uint32_t per_page, std::size_t page_bytes, std::uint8_t* pages) {
  if (id_bits < 1 || id_bits > 32 || per_page < 1 ||
      static_cast<std::size_t>(per_page) * record_bytes + 8 > page_bytes) {
    throw BadInput("link records of " + std::to_string(record_bytes) + " bytes, " +
                   std::to_string(per_page) + " to a page of " + std::to_string(page_bytes));
  }
  for (std::uint32_t row = 0; row < graph.rows; ++row) {
    std::uint8_t* record = pages + static_cast<std::size_t>(row / per_page) * page_bytes +
                           static_cast<std::size_t>(row % per_page) * record_bytes;
    const std::uint16_t count = graph.counts[row];
    if (2 + (static_cast<std::size_t>(count) * id_bits + 7) / 8 > record_bytes) {
      throw BadInput("node " + std::to_string(row) + " has " + std::to_string(count) +
                     " links, too many for its record");
    }
    std::memcpy(record, &count, 2);
    const std::uint32_t* ids = graph.ids + static_cast<std::size_t>(row) * graph.stride;
    std::size_t bit = 0;
    for (std::uint16_t j = 0; j < count; ++j, bit += id_bits) {
      if (id_bits < 32 && (ids[j] >> id_bits) != 0) {
        throw BadInput("link " + std::to_string(ids[j]) + " does not fit " +
                       std::to_string(id_bits) + " bits");
      }
      // Eight bytes from here stay inside the page: it ends in eight bytes of padding.
      std::uint64_t word;
      std::memcpy(&word, record + 2 + (bit >> 3), 8);
      word |= static_cast<std::uint64_t>(ids[j]) << (bit & 7);
      std::memcpy(record + 2 + (bit >> 3), &word, 8);
    }
  }
}

void unpack_links(const std::uint8_t* pages, std::uint32_t rows, std::uint32_t m,
                  std::uint32_t id_bits, std::uint32_t record_bytes, std::uint32_t per_page,
                  std::size_t page_bytes, std::uint32_t* ids, std::uint16_t* counts) {
  if (id_bits < 1 || id_bits > 32 || per_page < 1 || record_bytes < 2 ||
      static_cast<std::size_t>(per_page) * record_bytes + 8 > page_bytes) {
    throw CorruptData("link records of " + std::to_string(record_bytes) + " bytes, " +
                      std::to_string(per_page) + " to a page of " + std::to_string(page_bytes));
  }
  const std::uint64_t mask = (std::uint64_t{1} << id_bits) - 1;
  for (std::uint32_t row = 0; row < rows; ++row) {
    const std::uint8_t* record = pages + static_cast<std::size_t>(row / per_page) * page_bytes +
                                 static_cast<std::size_t>(row % per_page) * record_bytes;
    std::uint16_t count;
    std::memcpy(&count, record, 2);
    if (count > m || 2 + (static_cast<std::size_t>(count) * id_bits + 7) / 8 > record_bytes) {
      throw CorruptData("node " + std::to_string(row) + " has " + std::to_string(count) +
                        " links, of at most " + std::to_string(m));
    }
    counts[row] = count;
    std::uint32_t* out = ids + static_cast<std::size_t>(row) * m;
    std::size_t bit = 0;
    for (std::uint16_t j = 0; j < count; ++j, bit += id_bits) {
      std::uint64_t word;
      std::memcpy(&word, record + 2 + (bit >> 3), 8);
      out[j] = static_cast<std::uint32_t>((word >> (bit & 7)) & mask);
    }
  }
}

}  // namespace stoker
