// A small segment written by hand: answers against brute force, cold, warm, filtered, late, hostile.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "segment_fixture.hpp"
#include "stoker/errors.hpp"

using namespace stoker;
using stoker::testing::Fixture;
using stoker::testing::kPage;
using stoker::testing::recall;

namespace {

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

struct Asked {
  std::uint64_t pages = 0;
  double loss = 0;              // expected, in the mean
  std::vector<double> losses;
};

// `times` the same queries, by a searcher that nobody asked before, of a segment that holds what
// walks need and keeps nothing that is read.
Asked ask(Fixture& f, const std::vector<float>& queries, const SearchParams& params,
          int times = 1) {
  f.forget_forms();
  Searcher searcher(f.pool, f.layout, f.quantizer);
  std::vector<std::uint32_t> rows(params.k);
  std::vector<float> scores(params.k);
  Asked asked;
  for (std::size_t at = 0; at < queries.size() * static_cast<std::size_t>(times); at += f.dim) {
    const QueryStats stats = searcher.search(queries.data() + at % queries.size(), params,
                                             rows.data(), scores.data());
    // What coarse codes leave in doubt takes one round, and what vectors then show another.
    CHECK(stats.rounds <= 2);
    asked.pages += stats.pages_read;
    if (stats.pages_read > 0) f.forget_forms();
    asked.losses.push_back(1 - static_cast<double>(stats.expected_recall));
  }
  asked.loss = std::accumulate(asked.losses.begin(), asked.losses.end(), 0.0) /
               static_cast<double>(asked.losses.size());
  return asked;
}

// Only the excess is read: nothing where queries lack less in the mean than they may, from the
// first on; never more for a lower target; and the mean holds, of the hardest alone and over again
// too.
void only_the_excess_is_read(bool coarse, std::mt19937& rng) {
  std::mt19937 same(7);
  Fixture f(2000, 48, false, 4096 * kPage, same, false, coarse);
  f.load_walked();
  const auto queries = Fixture::make(400, f.dim, rng);
  SearchParams params;
  params.ef = 100;
  params.loss_ceiling = 1;
  params.resident_only = true;
  const Asked unread = ask(f, queries, params);
  params.resident_only = false;
  const auto may_lack = [&](double share) {
    params.mean_loss = static_cast<float>(share * unread.loss);
    params.rerank_target = static_cast<float>(1 - share * unread.loss);
    return share * unread.loss;
  };
  std::uint64_t before = ~std::uint64_t{0};
  for (const double share : {0.3, 0.5, 0.7, 0.9, 1.1}) {
    const double allowed = may_lack(share);
    const Asked asked = ask(f, queries, params);
    std::printf("%d bits, may lack %.4f of %.4f: %llu pages, at %.4f\n", coarse ? 2 : 4, allowed,
                unread.loss, static_cast<unsigned long long>(asked.pages), asked.loss);
    CHECK(asked.pages <= before);
    CHECK(asked.loss <= allowed * (1 + LossCredit::kCreditMax / 400));
    before = asked.pages;
  }
  // Coarse codes of directions at random leave some in doubt of more than all that is asked for,
  // and those are never let off.
  if (!coarse) CHECK_EQ(before, 0u);
  std::vector<std::size_t> order(400);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return unread.losses[a] > unread.losses[b];
  });
  std::vector<float> hardest;
  for (std::size_t i = 0; i < 40; ++i) {
    const auto first = queries.begin() + static_cast<std::ptrdiff_t>(48 * order[i]);
    hardest.insert(hardest.end(), first, first + 48);
  }
  const double allowed = may_lack(0.5);
  CHECK(ask(f, hardest, params, 10).loss <= allowed * (1 + LossCredit::kCreditMax / 400));
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
  for (const bool coarse : {false, true}) only_the_excess_is_read(coarse, rng);
  layouts_are_checked(rng);
  return 0;
}
