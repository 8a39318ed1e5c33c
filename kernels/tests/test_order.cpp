// Orders are permutations that respect groups; packed links read back as written.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "stoker/errors.hpp"
#include "stoker/order.hpp"

using namespace stoker;

namespace {

void orders_respect_groups(std::mt19937& rng) {
  for (int round = 0; round < 50; ++round) {
    const std::uint32_t n = 1 + rng() % 300;
    const std::size_t m = 1 + rng() % 8;
    std::vector<std::uint32_t> ids(n * m), groups(n);
    std::vector<std::uint16_t> counts(n);
    for (auto& id : ids) id = rng() % n;
    for (auto& count : counts) count = static_cast<std::uint16_t>(rng() % (m + 1));
    for (auto& group : groups) group = rng() % 4;
    const NeighborTable table{ids.data(), m, counts.data(), n};
    const auto order = locality_order(table, groups.data(), 1 + rng() % 20);
    auto sorted = order;
    std::sort(sorted.begin(), sorted.end());
    for (std::uint32_t i = 0; i < n; ++i) CHECK(sorted[i] == i);
    for (std::uint32_t i = 1; i < n; ++i) CHECK(groups[order[i - 1]] <= groups[order[i]]);
  }
}

// Cliques whose members are scattered over the ids come out side by side.
void cliques_share_pages() {
  constexpr std::uint32_t kCliques = 50, kSize = 10, n = kCliques * kSize;
  std::vector<std::uint32_t> ids(n * (kSize - 1)), groups(n, 0);
  std::vector<std::uint16_t> counts(n, kSize - 1);
  for (std::uint32_t node = 0; node < n; ++node) {
    std::uint32_t j = 0;
    for (std::uint32_t other = node % kCliques; other < n; other += kCliques) {
      if (other != node) ids[node * (kSize - 1) + j++] = other;
    }
  }
  const auto order =
      locality_order({ids.data(), kSize - 1, counts.data(), n}, groups.data(), kSize);
  for (std::uint32_t page = 0; page < kCliques; ++page) {
    for (std::uint32_t i = 0; i < kSize; ++i) {
      CHECK(order[page * kSize + i] % kCliques == order[page * kSize] % kCliques);
    }
  }
}

void links_round_trip(std::mt19937& rng) {
  for (std::uint32_t bits = 1; bits <= 32; ++bits) {
    const std::uint32_t rows = 1 + rng() % 200;
    const std::uint32_t m = 1 + rng() % 40;
    const std::uint32_t record = 2 + (m * bits + 7) / 8;
    const std::uint32_t per_page = (4096 - 8) / record;
    const std::size_t pages = (rows + per_page - 1) / per_page;
    std::vector<std::uint32_t> ids(rows * m);
    std::vector<std::uint16_t> counts(rows);
    const std::uint64_t limit = std::uint64_t{1} << bits;
    for (auto& id : ids) id = static_cast<std::uint32_t>(rng() % limit);
    for (auto& count : counts) count = static_cast<std::uint16_t>(rng() % (m + 1));
    std::vector<std::uint8_t> out(pages * 4096, 0);
    pack_links({ids.data(), m, counts.data(), rows}, bits, record, per_page, 4096, out.data());
    for (std::uint32_t row = 0; row < rows; ++row) {
      const std::uint8_t* at = out.data() + (row / per_page) * 4096 + (row % per_page) * record;
      std::uint16_t count;
      std::memcpy(&count, at, 2);
      CHECK_EQ(count, counts[row]);
      for (std::uint32_t j = 0; j < count; ++j) {
        std::uint64_t word;
        std::memcpy(&word, at + 2 + (j * bits >> 3), 8);
        const auto id = static_cast<std::uint32_t>((word >> (j * bits & 7)) & (limit - 1));
        CHECK_EQ(id, ids[row * m + j]);
      }
    }
  }
}

}  // namespace

int main() {
  const unsigned seed = 20260103;
  std::printf("seed %u\n", seed);
  std::mt19937 rng(seed);
  orders_respect_groups(rng);
  cliques_share_pages();
  links_round_trip(rng);
  const std::uint32_t bad = 9;
  const std::uint16_t one = 1;
  const std::uint32_t group = 0;
  CHECK_THROWS(locality_order({&bad, 1, &one, 1}, &group, 4), BadInput, "node 0 links to 9");
  return 0;
}
