// A small segment written by hand: answers against brute force, cold, warm, filtered, late, hostile.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "stoker/crc32c.hpp"
#include "stoker/errors.hpp"
#include "stoker/order.hpp"
#include "stoker/segment.hpp"

using namespace stoker;

namespace {

constexpr std::size_t kPage = 4096;

std::vector<std::uint8_t> to_pages(const std::vector<std::uint8_t>& records, std::size_t record,
                                   std::size_t per_page) {
  const std::size_t count = records.size() / record;
  std::vector<std::uint8_t> pages((count + per_page - 1) / per_page * kPage, 0);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(pages.data() + i / per_page * kPage + i % per_page * record,
                records.data() + i * record, record);
  }
  return pages;
}

StoreId add(PagePool& pool, const std::string& path, const std::vector<std::uint8_t>& pages) {
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
          bool hostile_links = false, bool coarse_walk = false, bool hostile_vectors = false)
      : n(n_), dim(dim_), l2(l2_), vectors(make(n_, dim_, rng)),
        quantizer(dim_, 3, std::vector<float>(dim_, 0.1f).data()),
        pool([&] {
          PoolOptions options;
          options.budget_bytes = budget;
          options.backend = IoBackend::threads;   // the sanitizers see threads, not the kernel
          options.io_threads = 2;
          return options;
        }()) {
    char name[] = "stoker-searcher-XXXXXX";   // beside the build: a real disk
    folder = mkdtemp(name);
    // Every node links to its 16 nearest and to 4 random ones: walkable from anywhere.
    constexpr std::size_t kLinks = 20;
    std::vector<std::uint32_t> ids(n * kLinks);
    std::vector<std::uint16_t> counts(n, static_cast<std::uint16_t>(std::min(kLinks, n - 1)));
    // Distances once, not in each comparison: under a sanitizer that is most of the test's time.
    std::vector<std::uint32_t> order(n);
    std::vector<double> distances(n);
    for (std::size_t i = 0; i < n; ++i) {
      std::iota(order.begin(), order.end(), 0u);
      for (std::uint32_t j = 0; j < n; ++j) distances[j] = l2_of(vectors.data() + i * dim, j);
      std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
        return distances[a] < distances[b];
      });
      for (std::size_t j = 0; j < counts[i]; ++j) {
        ids[i * kLinks + j] = j < 16 ? order[1 + j] : static_cast<std::uint32_t>(rng() % n);
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

  static std::vector<float> make(std::size_t n, std::size_t dim, std::mt19937& rng) {
    std::normal_distribution<float> normal;
    std::vector<float> out(n * dim);
    for (float& v : out) v = normal(rng);
    return out;
  }
  double l2_of(const float* q, std::uint32_t row) const {
    double sum = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      const double x = static_cast<double>(q[d]) - vectors[row * dim + d];
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

double recall(const std::vector<std::uint32_t>& found, const std::vector<std::uint32_t>& truth) {
  if (truth.empty()) return 1;
  double met = 0;
  for (const std::uint32_t row : truth) {
    met += std::find(found.begin(), found.end(), row) != found.end() ? 1 : 0;
  }
  return met / static_cast<double>(truth.size());
}

void answers_like_brute_force(bool l2, std::size_t budget_pages, bool coarse, std::mt19937& rng) {
  Fixture f(600, 40, l2, budget_pages * kPage, rng, false, coarse);
  Searcher searcher(f.pool, f.layout, f.quantizer);
  SearchParams params;
  params.ef = 400;   // inner products over a graph of distances want a wide walk
  params.rerank_target = 0.9999f;
  params.read_vectors = true;
  params.rerank_reads_max = 100;
  double mean = 0;
  std::vector<std::uint8_t> allow((f.n + 7) / 8);
  for (int round = 0; round < 60; ++round) {
    const auto query = Fixture::make(1, f.dim, rng);
    const bool filtered = round % 3 == 0;
    if (filtered) {
      for (auto& byte : allow) byte = static_cast<std::uint8_t>(rng() & (round % 2 ? 0xFF : 0x11));
      params.allow = allow.data();
      params.allow_count = 0;
      for (std::uint32_t i = 0; i < f.n; ++i) params.allow_count += (allow[i >> 3] >> (i & 7)) & 1;
    } else {
      params.allow = nullptr;
    }
    std::vector<std::uint32_t> rows(params.k);
    std::vector<float> scores(params.k);
    const QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
    const auto truth = f.truth(query.data(), params.k, filtered ? &allow : nullptr);
    mean += recall(rows, truth);
    CHECK_EQ(stats.skipped, 0u);
    for (std::size_t i = 0; i < params.k && rows[i] != kNoRow; ++i) {
      if (filtered) CHECK(((allow[rows[i] >> 3] >> (rows[i] & 7)) & 1) != 0);
      const double exact = (l2 ? 1 : -1) * f.score(query.data(), rows[i]);
      // Those out of doubt keep the first plane's estimate: within some deviations of the truth.
      double length2 = 0;
      for (const float v : query) length2 += static_cast<double>(v) * v;
      const double error = coarse ? f.layout.coarse_error : f.layout.code_error;
      const double deviation = error * std::sqrt(length2 * 2 * f.dim) * (l2 ? 2 : 1);
      CHECK(std::fabs(scores[i] - exact) < 6 * deviation);
      if (i > 0) CHECK(l2 ? scores[i] >= scores[i - 1] : scores[i] <= scores[i - 1]);
    }
    f.pool.check();
  }
  std::printf("%s, %zu pages, %d bits: recall %.4f\n", l2 ? "l2" : "ip", budget_pages,
              coarse ? 2 : 4, mean / 60);
  CHECK(mean / 60 > 0.95);
}

void answers_from_memory_alone(std::mt19937& rng) {
  Fixture f(300, 24, false, 4096 * kPage, rng);
  Searcher searcher(f.pool, f.layout, f.quantizer);
  const auto query = Fixture::make(1, f.dim, rng);
  SearchParams params;
  params.resident_only = true;
  std::vector<std::uint32_t> rows(params.k);
  std::vector<float> scores(params.k);
  QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
  CHECK(rows[0] == kNoRow);
  CHECK(stats.bytes_read == 0);
  CHECK(stats.skipped > 0);   // no way in is no whole answer
  params.resident_only = false;
  params.deadline = Clock::now() - std::chrono::seconds(1);
  stats = searcher.search(query.data(), params, rows.data(), scores.data());
  CHECK(stats.deadline_hit && stats.bytes_read == 0 && stats.skipped > 0);
  params.deadline.reset();
  stats = searcher.search(query.data(), params, rows.data(), scores.data());
  CHECK(rows[9] != kNoRow && stats.bytes_read > 0);
  params.resident_only = true;   // what the last query brought is still there
  stats = searcher.search(query.data(), params, rows.data(), scores.data());
  CHECK(rows[9] != kNoRow && stats.bytes_read == 0);
  // Vectors come back as they were written.
  const std::uint32_t wanted[] = {0, 299, 7, 7};
  std::vector<float> out(4 * f.dim);
  CHECK(searcher.vectors(wanted, 4, out.data()) == 0);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(std::memcmp(out.data() + i * f.dim, f.vectors.data() + wanted[i] * f.dim, f.dim * 4) == 0);
  }
}

void hostile_links_do_not_crash(std::mt19937& rng) {
  Fixture f(200, 16, false, 4096 * kPage, rng, true);
  Searcher searcher(f.pool, f.layout, f.quantizer);
  SearchParams params;
  std::vector<std::uint32_t> rows(params.k);
  std::vector<float> scores(params.k);
  const auto query = Fixture::make(1, f.dim, rng);
  const QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
  CHECK(stats.damaged > 0);
}

// Vectors whose checksums hold and that are no numbers: the estimate stays, and sorts.
void hostile_vectors_keep_the_estimate(bool l2, std::mt19937& rng) {
  Fixture f(300, 32, l2, 4096 * kPage, rng, false, false, true);
  Searcher searcher(f.pool, f.layout, f.quantizer);
  SearchParams params;
  params.ef = 300;
  params.k = 50;
  params.read_vectors = true;
  std::vector<std::uint32_t> rows(params.k);
  std::vector<float> scores(params.k);
  for (int i = 0; i < 20; ++i) {   // at first they are read, later resident
    const auto query = Fixture::make(1, f.dim, rng);
    const QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
    CHECK(stats.damaged > 0);
    for (std::size_t j = 0; j < rows.size(); ++j) {
      CHECK(rows[j] < 300 && std::isfinite(scores[j]));
      if (j > 0) CHECK(l2 ? scores[j] >= scores[j - 1] : scores[j] <= scores[j - 1]);
    }
  }
}

void threads_agree(std::mt19937& rng) {
  Fixture f(400, 32, true, 24 * kPage, rng);   // less than it has: pages come and go
  Searcher searcher(f.pool, f.layout, f.quantizer);
  SearchParams params;
  params.ef = 200;
  params.rerank_target = 0.99f;
  const auto queries = Fixture::make(40, f.dim, rng);
  std::vector<double> recalls(4, 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::uint32_t> rows(params.k);
      std::vector<float> scores(params.k);
      for (std::size_t i = 0; i < 40; ++i) {
        const float* query = queries.data() + i * f.dim;
        searcher.search(query, params, rows.data(), scores.data());
        recalls[t] += recall(rows, f.truth(query, params.k));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const double sum : recalls) CHECK(sum / 40 > 0.9);
  f.pool.check();
}

// Where most pages are resident, what some queries lack is made up for by the others: fewer reads,
// and the mean of what is expected stays within what the target allows.
void the_mean_lets_some_off(std::mt19937& rng) {
  const auto queries = Fixture::make(400, 48, rng);
  std::uint64_t pages[2];
  double mean[2] = {0, 0};
  for (const bool together : {false, true}) {
    std::mt19937 same(7);
    Fixture f(2000, 48, false, 70 * kPage, same);
    Searcher searcher(f.pool, f.layout, f.quantizer);
    SearchParams params;
    params.ef = 100;
    params.rerank_target = 0.96f;
    params.mean_loss = together ? 0.05f : 0;
    params.loss_ceiling = 0.3f;
    std::vector<std::uint32_t> rows(params.k);
    std::vector<float> scores(params.k);
    pages[together] = 0;
    for (std::size_t i = 0; i < 400; ++i) {
      const QueryStats stats =
          searcher.search(queries.data() + i * 48, params, rows.data(), scores.data());
      pages[together] += stats.pages_read;
      mean[together] += stats.expected_recall / 400.0;
    }
  }
  std::printf("alone: %llu pages at %.4f; together: %llu at %.4f\n",
              static_cast<unsigned long long>(pages[0]), mean[0],
              static_cast<unsigned long long>(pages[1]), mean[1]);
  CHECK(pages[1] < 0.9 * static_cast<double>(pages[0]));
  CHECK(mean[1] < mean[0] && mean[1] > 1 - 0.05 * (1 + LossCredit::kCreditMax / 400));
}

// Of nine floats some lie on two pages. No code is read, and what is no number is no answer.
void few_dimensions_are_compared_themselves(bool l2, bool hostile, std::mt19937& rng) {
  Fixture f(600, 9, l2, 16 * kPage, rng, false, false, hostile);
  f.layout.walk_vectors = true;
  f.layout.entry_row = 599;   // one that has numbers
  Searcher searcher(f.pool, f.layout, f.quantizer);
  SearchParams params;
  params.ef = 200;
  std::vector<std::uint32_t> rows(params.k);
  std::vector<float> scores(params.k);
  double mean = 0;
  for (int i = 0; i < 40; ++i) {   // at first they are read, later resident
    const auto query = Fixture::make(1, f.dim, rng);
    const QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
    for (std::size_t j = 0; j < rows.size(); ++j) {
      CHECK(rows[j] < 600 && std::isfinite(scores[j]));
      const double exact = f.score(query.data(), rows[j]) * (l2 ? 1 : -1);
      CHECK(std::fabs(scores[j] - exact) < 1e-4 * (1 + std::fabs(exact)));
      if (j > 0) CHECK(l2 ? scores[j] >= scores[j - 1] : scores[j] <= scores[j - 1]);
    }
    CHECK(hostile ? stats.damaged > 0 : stats.exact == params.k && stats.damaged == 0);
    CHECK(stats.skipped == 0 && stats.expected_recall == 1);
    mean += recall(rows, f.truth(query.data(), params.k)) / 40;
  }
  for (const std::uint8_t state : f.pool.residency(f.layout.codes.store)) CHECK(state == 0);
  if (!hostile) CHECK(mean > 0.95);
}

void layouts_are_checked(std::mt19937& rng) {
  Fixture f(100, 16, false, 4096 * kPage, rng);
  auto refuses = [&](auto change, const char* part) {
    SegmentLayout layout = f.layout;
    change(layout);
    CHECK_THROWS(Searcher(f.pool, layout, f.quantizer), CorruptData, part);
  };
  refuses([](SegmentLayout& l) { l.entry_row = 100; }, "entry point");
  refuses([](SegmentLayout& l) { l.levels[0].id_bits = 33; }, "id width");
  refuses([](SegmentLayout& l) { l.levels[0].m = 60000; }, "link record size");
  refuses([](SegmentLayout& l) { l.levels[0].first_page = 4000; }, "too few pages");
  refuses([](SegmentLayout& l) { l.levels[0].first_page = 0xFFFFFFFF; }, "too few pages");
  refuses([](SegmentLayout& l) { l.codes.per_page = Divisor(1000); }, "do not fit");
  refuses([](SegmentLayout& l) { l.walk_coarse = true; l.coarse.record_bytes = 9; }, "coarse record");
  refuses([](SegmentLayout& l) { l.count = 100000; }, "bottom level");
  refuses([](SegmentLayout& l) { l.vectors.record_bytes = 4; }, "vector record size");
}

}  // namespace

int main() {
  const unsigned seed = 20260104;
  std::printf("seed %u\n", seed);
  std::mt19937 rng(seed);
  for (const bool l2 : {false, true}) {
    for (const bool coarse : {false, true}) {
      answers_like_brute_force(l2, 4096, coarse, rng);
      answers_like_brute_force(l2, 16, coarse, rng);
    }
  }
  answers_from_memory_alone(rng);
  hostile_links_do_not_crash(rng);
  for (const bool l2 : {false, true}) hostile_vectors_keep_the_estimate(l2, rng);
  for (const bool l2 : {false, true}) {
    for (const bool hostile : {false, true}) few_dimensions_are_compared_themselves(l2, hostile, rng);
  }
  threads_agree(rng);
  the_mean_lets_some_off(rng);
  layouts_are_checked(rng);
  return 0;
}
