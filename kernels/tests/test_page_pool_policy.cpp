// What the pool keeps under pressure: on skewed use it must beat least-recently-used, a scan must
// not wash out what is used, and weights must count.
#include <algorithm>
#include <cmath>
#include <list>
#include <numeric>
#include <random>

#include "check.hpp"
#include "page_files.hpp"

using namespace stoker;
using stoker::testing::TestFolder;

namespace {

constexpr std::size_t kPage = 512;
constexpr PageNumber kPages = 8000;
constexpr std::uint32_t kFrames = 800;

std::vector<PageNumber> zipf_trace(double exponent, std::size_t length, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<double> cumulated(kPages);
  double sum = 0;
  for (PageNumber rank = 0; rank < kPages; ++rank) {
    sum += 1 / std::pow(rank + 1.0, exponent);
    cumulated[rank] = sum;
  }
  std::vector<PageNumber> page_of(kPages);
  std::iota(page_of.begin(), page_of.end(), 0u);
  for (PageNumber i = kPages - 1; i > 0; --i) std::swap(page_of[i], page_of[random() % (i + 1)]);
  std::vector<PageNumber> trace(length);
  for (PageNumber& page : trace) {
    const double at = static_cast<double>(random() >> 11) / 9007199254740992.0 * sum;
    const auto rank = std::lower_bound(cumulated.begin(), cumulated.end(), at) - cumulated.begin();
    page = page_of[static_cast<std::size_t>(rank)];
  }
  return trace;
}

double least_recently_used(const std::vector<PageNumber>& trace) {
  std::list<PageNumber> order;
  std::vector<std::list<PageNumber>::iterator> where(kPages);
  std::vector<bool> in(kPages, false);
  std::size_t hits = 0;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    const PageNumber page = trace[i];
    if (in[page]) {
      if (i >= trace.size() / 4) ++hits;
      order.splice(order.begin(), order, where[page]);
      continue;
    }
    if (order.size() == kFrames) {
      in[order.back()] = false;
      order.pop_back();
    }
    order.push_front(page);
    where[page] = order.begin();
    in[page] = true;
  }
  return static_cast<double>(hits) / static_cast<double>(trace.size() - trace.size() / 4);
}

struct Scene {
  Scene() : folder("/dev/shm") {
    PoolOptions options;
    options.page_bytes = kPage;
    options.budget_bytes = kFrames * kPage;
    pool = std::make_unique<PagePool>(options);
    store = pool->add_store(folder.write("pages", 1, kPages, kPage));
  }

  bool use(PageNumber page) {
    const PagePool::View view = pool->view(store);
    {
      const PagePool::ReadGuard guard(*pool);
      if (view.touch(page) != nullptr) return true;
    }
    const PageRef wanted{store, page};
    (void)pool->fetch(&wanted, 1);
    return false;
  }

  double hit_ratio(const std::vector<PageNumber>& trace) {
    std::size_t hits = 0;
    for (std::size_t i = 0; i < trace.size(); ++i) {
      if (use(trace[i]) && i >= trace.size() / 4) ++hits;
    }
    return static_cast<double>(hits) / static_cast<double>(trace.size() - trace.size() / 4);
  }

  TestFolder folder;
  std::unique_ptr<PagePool> pool;
  StoreId store = 0;
};

void test_skewed_use_beats_lru() {
  for (const double exponent : {1.0, 0.8}) {
    Scene scene;
    const std::vector<PageNumber> trace = zipf_trace(exponent, 60000, 11);
    const double ours = scene.hit_ratio(trace);
    const double lru = least_recently_used(trace);
    std::printf("  Zipf %.1f: %.3f of uses hit, least-recently-used %.3f\n", exponent, ours, lru);
    CHECK(ours > lru + 0.03);
    scene.pool->check();
  }
}

void test_a_scan_washes_nothing_out() {
  Scene scene;
  for (int round = 0; round < 3; ++round) {
    for (PageNumber page = 0; page < 500; ++page) scene.use(page);
  }
  for (PageNumber page = 1000; page < kPages; ++page) scene.use(page);
  const std::vector<std::uint8_t> states = scene.pool->residency(scene.store);
  const auto kept = std::count(states.begin(), states.begin() + 500, 1);
  std::printf("  %d of 500 used pages outlive a scan of %u\n", static_cast<int>(kept), kPages - 1000);
  CHECK(kept >= 450);
}

void test_weights_count() {
  Scene scene;
  std::vector<PageNumber> heavy(400);
  std::iota(heavy.begin(), heavy.end(), 0u);
  std::vector<PageNumber> light(400);
  std::iota(light.begin(), light.end(), 400u);
  LoadOptions options;
  options.weight = 7;
  scene.pool->load(scene.store, heavy.data(), heavy.size(), options);
  options.weight = 0;
  scene.pool->load(scene.store, light.data(), light.size(), options);
  for (PageNumber page = 1000; page < 1600; ++page) scene.use(page);
  const std::vector<std::uint8_t> states = scene.pool->residency(scene.store);
  CHECK_EQ(std::count(states.begin(), states.begin() + 400, 1), 400);
  CHECK(std::count(states.begin() + 400, states.begin() + 800, 1) < 100);
  scene.pool->check();
}

// One more page than frames costs little: nothing is evicted for pages that would fit.
void test_what_fits_stays() {
  Scene scene;
  for (int round = 0; round < 3; ++round) {
    for (PageNumber page = 0; page < kFrames; ++page) scene.use(page);
  }
  CHECK_EQ(scene.pool->stats().demand_reads, kFrames);
  CHECK_EQ(scene.pool->stats().evictions, 0u);
}

}  // namespace

int main() {
  RUN(test_skewed_use_beats_lru);
  RUN(test_a_scan_washes_nothing_out);
  RUN(test_weights_count);
  RUN(test_what_fits_stays);
  return 0;
}
