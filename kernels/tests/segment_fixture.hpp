// A small segment written by hand, and what is true of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "stoker/crc32c.hpp"
#include "stoker/order.hpp"
#include "stoker/segment.hpp"

namespace stoker::testing {

constexpr std::size_t kPage = 4096;

inline std::vector<std::uint8_t> to_pages(const std::vector<std::uint8_t>& records, std::size_t record,
                                   std::size_t per_page) {
  const std::size_t count = records.size() / record;
  std::vector<std::uint8_t> pages((count + per_page - 1) / per_page * kPage, 0);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(pages.data() + i / per_page * kPage + i % per_page * record,
                records.data() + i * record, record);
  }
  return pages;
}

inline StoreId add(PagePool& pool, const std::string& path, const std::vector<std::uint8_t>& pages) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(pages.data()),
             static_cast<std::streamsize>(pages.size()));
  StoreSpec spec;
  spec.path = path;
  spec.page_count = static_cast<std::uint32_t>(pages.size() / kPage);
  for (std::size_t at = 0; at < pages.size(); at += kPage) {
    spec.checksums.push_back(crc32c(pages.data() + at, kPage));
  }
  return pool.add_store(spec);
}

struct Fixture {
  std::string folder;
  std::size_t n, dim;
  bool l2;
  std::vector<float> vectors;
  Quantizer quantizer;
  PagePool pool;
  SegmentLayout layout;

  Fixture(std::size_t n_, std::size_t dim_, bool l2_, std::size_t budget, std::mt19937& rng,
          bool hostile_links = false, bool coarse_walk = false, bool hostile_vectors = false,
          IoBackend backend = IoBackend::threads)   // the sanitizers see threads, not the kernel
      : n(n_), dim(dim_), l2(l2_), vectors(make(n_, dim_, rng)),
        quantizer(dim_, 3, std::vector<float>(dim_, 0.1f).data()),
        pool([&] {
          PoolOptions options;
          options.budget_bytes = budget;
          options.backend = backend;
          options.io_threads = 2;
          return options;
        }()) {
    char name[] = "stoker-searcher-XXXXXX";   // beside the build: a real disk
    folder = mkdtemp(name);
    // Every node links to its 16 nearest and to 4 random ones: walkable from anywhere.
    constexpr std::size_t kLinks = 20;
    std::vector<std::uint32_t> ids(n * kLinks);
    std::vector<std::uint16_t> counts(n, static_cast<std::uint16_t>(std::min(kLinks, n - 1)));
    // Each distance once, and no more of the order than links need: under a sanitizer that is most
    // of the test's time.
    constexpr std::size_t kNearest = 17;   // itself too
    std::vector<std::pair<double, std::uint32_t>> order(n);
    std::vector<double> distances(n * n);
    for (std::uint32_t i = 0; i < n; ++i) {
      for (std::uint32_t j = i; j < n; ++j) {
        distances[i * n + j] = distances[j * n + i] = l2_of(vectors.data() + i * dim, j);
      }
    }
    for (std::size_t i = 0; i < n; ++i) {
      for (std::uint32_t j = 0; j < n; ++j) order[j] = {distances[i * n + j], j};
      std::partial_sort(order.begin(),
                        order.begin() + static_cast<std::ptrdiff_t>(std::min(kNearest, n)),
                        order.end());
      for (std::size_t j = 0; j < counts[i]; ++j) {
        ids[i * kLinks + j] = j < 16 ? order[1 + j].second : static_cast<std::uint32_t>(rng() % n);
        if (hostile_links) ids[i * kLinks + j] = static_cast<std::uint32_t>(rng());
      }
    }
    LinkLevel level;
    level.count = static_cast<std::uint32_t>(n);
    level.m = kLinks;
    level.id_bits = 32;
    level.record_bytes = 2 + kLinks * 4;
    level.per_page = Divisor((kPage - 8) / level.record_bytes);
    std::vector<std::uint8_t> links((n + level.per_page.value() - 1) / level.per_page.value() *
                                    kPage, 0);
    pack_links({ids.data(), kLinks, counts.data(), level.count}, 32, level.record_bytes,
               level.per_page.value(), kPage, links.data());
    const CodeShape& shape = quantizer.shape();
    std::vector<std::uint8_t> codes(n * shape.code_record_bytes);
    std::vector<std::uint8_t> refines(n * shape.refine_record_bytes);
    std::vector<std::uint8_t> coarse(n * shape.coarse_record_bytes);
    quantizer.encode(vectors.data(), n, codes.data(), refines.data(), coarse.data());
    std::vector<std::uint8_t> raw((n * dim * 4 + kPage - 1) / kPage * kPage, 0);
    std::memcpy(raw.data(), vectors.data(), n * dim * 4);
    if (hostile_vectors) std::memset(raw.data(), 0xFF, n * dim * 2);   // the first half: no numbers
    layout.dim = static_cast<std::uint32_t>(dim);
    layout.count = level.count;
    layout.metric = l2 ? Metric::l2 : Metric::inner_product;
    layout.entry_row = 0;
    layout.levels = {level};
    layout.code_error = 0.1f / std::sqrt(static_cast<float>(dim));
    layout.refine_error = 0.01f / std::sqrt(static_cast<float>(dim));
    layout.links = add(pool, folder + "/links", links);
    const auto code_bytes = static_cast<std::uint32_t>(shape.code_record_bytes);
    const auto refine_bytes = static_cast<std::uint32_t>(shape.refine_record_bytes);
    layout.codes = {add(pool, folder + "/codes", to_pages(codes, code_bytes, kPage / code_bytes)),
                    code_bytes, Divisor(static_cast<std::uint32_t>(kPage / code_bytes))};
    layout.refine = {
        add(pool, folder + "/refine", to_pages(refines, refine_bytes, kPage / refine_bytes)),
        refine_bytes, Divisor(static_cast<std::uint32_t>(kPage / refine_bytes))};
    const auto coarse_bytes = static_cast<std::uint32_t>(shape.coarse_record_bytes);
    layout.coarse = {
        add(pool, folder + "/coarse", to_pages(coarse, coarse_bytes, kPage / coarse_bytes)),
        coarse_bytes, Divisor(static_cast<std::uint32_t>(kPage / coarse_bytes))};
    layout.coarse_error = 0.4f / std::sqrt(static_cast<float>(dim));
    layout.walk_coarse = coarse_walk;
    layout.vectors = {add(pool, folder + "/vectors", raw), static_cast<std::uint32_t>(dim * 4),
                      false};
  }
  ~Fixture() {
    for (const char* name : {"/links", "/codes", "/refine", "/coarse", "/vectors"}) {
      std::remove((folder + name).c_str());
    }
    std::remove(folder.c_str());
  }

  std::uint64_t evict_all(StoreId store) {
    std::vector<PageNumber> pages(pool.view(store).page_count);
    std::iota(pages.begin(), pages.end(), 0u);
    return pool.evict(store, pages.data(), pages.size());
  }

  // Lets go what settles answers.
  void forget_forms() {
    if (layout.walk_coarse) evict_all(layout.codes.store);
    evict_all(layout.refine.store);
    evict_all(layout.vectors.store);
  }

  // Brings what walks need into memory, and nothing of what settles answers.
  void load_walked() {
    for (const StoreId store :
         {layout.links, layout.walk_coarse ? layout.coarse.store : layout.codes.store}) {
      std::vector<PageNumber> pages(pool.view(store).page_count);
      std::iota(pages.begin(), pages.end(), 0u);
      CHECK_EQ(pool.load(store, pages.data(), pages.size(), {}).pages_failed, 0u);
    }
  }

  static std::vector<float> make(std::size_t n, std::size_t dim, std::mt19937& rng) {
    std::normal_distribution<float> normal;
    std::vector<float> out(n * dim);
    for (float& v : out) v = normal(rng);
    return out;
  }
  double l2_of(const float* q, std::uint32_t row) const {
    CHECK(row < n);
    return l2_between(q, vectors.data() + row * dim, dim);
  }
  // What the tests know the truth by is not under test: unwatched it takes a fraction of the time.
  __attribute__((no_sanitize("address", "undefined", "thread"))) static double l2_between(
      const float* a, const float* b, std::size_t dim) {
    double sum = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      const double x = static_cast<double>(a[d]) - b[d];
      sum += x * x;
    }
    return sum;
  }
  double score(const float* q, std::uint32_t row) const {   // smaller is nearer
    if (l2) return l2_of(q, row);
    double sum = 0;
    for (std::size_t d = 0; d < dim; ++d) sum -= static_cast<double>(q[d]) * vectors[row * dim + d];
    return sum;
  }
  std::vector<std::uint32_t> truth(const float* q, std::size_t k,
                                   const std::vector<std::uint8_t>* allow = nullptr) const {
    std::vector<std::uint32_t> rows;
    std::vector<double> scores(n);
    for (std::uint32_t i = 0; i < n; ++i) {
      scores[i] = score(q, i);
      if (allow == nullptr || (((*allow)[i >> 3] >> (i & 7)) & 1) != 0) rows.push_back(i);
    }
    std::sort(rows.begin(), rows.end(),
              [&](std::uint32_t a, std::uint32_t b) { return scores[a] < scores[b]; });
    rows.resize(std::min(k, rows.size()));
    return rows;
  }
};

inline double recall(const std::vector<std::uint32_t>& found, const std::vector<std::uint32_t>& truth) {
  if (truth.empty()) return 1;
  double met = 0;
  for (const std::uint32_t row : truth) {
    met += std::find(found.begin(), found.end(), row) != found.end() ? 1 : 0;
  }
  return met / static_cast<double>(truth.size());
}

}  // namespace stoker::testing
