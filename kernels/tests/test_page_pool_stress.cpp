// Many threads at once: readers inside guards compare every byte they see, while fetches, loads,
// evictions and budget changes churn the frames under them. For the thread sanitizer, too.
#include <numeric>
#include <random>
#include <thread>

#include "check.hpp"
#include "page_files.hpp"
#include "stoker/errors.hpp"

using namespace stoker;
using stoker::testing::kBackends;
using stoker::testing::page_matches;
using stoker::testing::TestFolder;

namespace {

constexpr std::size_t kPage = 1024;
constexpr std::uint32_t kPages = 400;
constexpr std::uint32_t kStores = 3;
constexpr std::uint32_t kFrames = 96;

#ifdef __SANITIZE_THREAD__
constexpr int kRounds = 60;
#else
constexpr int kRounds = 150;
#endif

struct Scene {
  explicit Scene(IoBackend backend) {
    PoolOptions options;
    options.page_bytes = kPage;
    options.budget_bytes = kFrames * kPage;
    options.backend = backend;
    options.io_threads = 4;
    pool = std::make_unique<PagePool>(options);
    for (std::uint32_t i = 0; i < kStores; ++i) {
      stores.push_back(pool->add_store(folder.write("s" + std::to_string(i), i, kPages, kPage)));
    }
  }
  TestFolder folder;
  std::unique_ptr<PagePool> pool;
  std::vector<StoreId> stores;
  std::atomic<bool> stop{false};
};

// A few hot pages and a long tail.
PageNumber draw(std::mt19937_64& random) {
  const std::uint64_t dice = random();
  return static_cast<PageNumber>(dice % 4 != 0 ? (dice >> 8) % 40 : (dice >> 8) % kPages);
}

void read(Scene& scene, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  // A few rounds at least, if the workers are done before this thread has begun.
  for (int round = 0; round < 100 || !scene.stop.load(std::memory_order_relaxed); ++round) {
    const PagePool::ReadGuard guard(*scene.pool);
    const std::byte* bytes[8];
    std::uint32_t salts[8];
    PageNumber pages[8];
    for (int i = 0; i < 8; ++i) {
      salts[i] = static_cast<std::uint32_t>(random() % kStores);
      pages[i] = draw(random);
      bytes[i] = scene.pool->view(scene.stores[salts[i]]).touch(pages[i]);
    }
    // Late, so that evictions fall between the look and the use.
    for (int i = 0; i < 8; ++i) {
      if (bytes[i] != nullptr) CHECK(page_matches(bytes[i], kPage, salts[i], pages[i]));
    }
  }
}

void fetch(Scene& scene, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  PinnedPages kept;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<PageRef> wanted;
    for (std::uint64_t i = 1 + random() % 12; i > 0; --i) {
      wanted.push_back({scene.stores[random() % kStores], draw(random)});
    }
    Deadline deadline;
    if (random() % 4 == 0) deadline = Clock::now() + std::chrono::microseconds(random() % 200);
    PinnedPages pinned = scene.pool->fetch(wanted.data(), wanted.size(), deadline);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (pinned.status(i) == PageStatus::deadline) {
        CHECK(deadline.has_value() && pinned.data(i) == nullptr);
        continue;
      }
      CHECK(pinned.status(i) == PageStatus::ok);
      const std::uint64_t salt = wanted[i].store - scene.stores[0];
      CHECK(page_matches(pinned.data(i), kPage, salt, wanted[i].page));
    }
    if (random() % 3 == 0) kept = std::move(pinned);
  }
}

void load(Scene& scene, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int round = 0; round < kRounds / 3; ++round) {
    const StoreId store = scene.stores[random() % kStores];
    const auto first = static_cast<PageNumber>(random() % (kPages - 30));
    std::vector<PageNumber> pages(20);
    std::iota(pages.begin(), pages.end(), first);
    LoadOptions options;
    options.evict = random() % 2 == 0;
    options.sticky = random() % 4 == 0;
    options.run_bytes_max = 8 * kPage;
    if (random() % 4 == 0) options.deadline = Clock::now() + std::chrono::microseconds(300);
    const LoadReport report = scene.pool->load(store, pages.data(), pages.size(), options);
    CHECK_EQ(report.pages_loaded + report.pages_already + report.pages_no_room +
                 report.pages_not_reached,
             pages.size());
    if (options.sticky) scene.pool->unstick(store, pages.data(), pages.size());
  }
}

void churn(Scene& scene, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int round = 0; round < kRounds / 2; ++round) {
    const StoreId store = scene.stores[random() % kStores];
    std::vector<PageNumber> pages(10);
    std::iota(pages.begin(), pages.end(), static_cast<PageNumber>(random() % (kPages - 10)));
    scene.pool->evict(store, pages.data(), pages.size());
    try {
      scene.pool->set_budget((kFrames / 2 + random() % (kFrames / 2 + 1)) * kPage);
    } catch (const StoreError&) {
      // Sticky or pinned pages stood against it.
    }
    (void)scene.pool->stats();
    (void)scene.pool->store_stats(store);
    (void)scene.pool->residency(store);
    scene.pool->check();
    std::this_thread::yield();
  }
}

// A store of its own comes, is used and goes, again and again.
void come_and_go(Scene& scene, std::uint64_t seed, TestFolder& folder) {
  std::mt19937_64 random(seed);
  const StoreSpec spec = folder.write("guest", 99, 50, kPage);
  for (int round = 0; round < kRounds / 5; ++round) {
    const StoreId store = scene.pool->add_store(spec);
    std::vector<PageRef> wanted;
    for (int i = 0; i < 6; ++i) wanted.push_back({store, static_cast<PageNumber>(random() % 50)});
    const Deadline deadline = Clock::now() + std::chrono::microseconds(random() % 300);
    PinnedPages pinned = scene.pool->fetch(wanted.data(), wanted.size(), deadline);
    scene.pool->remove_store(store);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (pinned.status(i) != PageStatus::ok) continue;
      CHECK(page_matches(pinned.data(i), kPage, 99, wanted[i].page));
    }
  }
}

// Nobody holds anything any more: every page can go, so no pin was lost.
void check_all_can_go(Scene& scene) {
  for (std::uint32_t salt = 0; salt < kStores; ++salt) {
    for (PageNumber page = 0; page < kPages; ++page) {   // ends the reads that are still out
      const PageRef wanted{scene.stores[salt], page};
      const PinnedPages pinned = scene.pool->fetch(&wanted, 1);
      CHECK(page_matches(pinned.data(0), kPage, salt, page));
    }
  }
  std::vector<PageNumber> pages(kPages);
  std::iota(pages.begin(), pages.end(), 0u);
  for (const StoreId store : scene.stores) {
    scene.pool->unstick(store, pages.data(), pages.size());
    scene.pool->evict(store, pages.data(), pages.size());
  }
  CHECK_EQ(scene.pool->stats().resident_bytes, 0u);
  scene.pool->check();
}

void test_all_at_once() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend);
    TestFolder guests;
    std::vector<std::thread> readers;
    std::vector<std::thread> workers;
    for (std::uint64_t i = 0; i < 3; ++i) {
      readers.emplace_back([&scene, i] { read(scene, 100 + i); });
    }
    for (std::uint64_t i = 0; i < 4; ++i) {
      workers.emplace_back([&scene, i] { fetch(scene, 200 + i); });
    }
    for (std::uint64_t i = 0; i < 2; ++i) {
      workers.emplace_back([&scene, i] { load(scene, 300 + i); });
    }
    workers.emplace_back([&scene] { churn(scene, 400); });
    workers.emplace_back([&scene, &guests] { come_and_go(scene, 500, guests); });
    for (std::thread& worker : workers) worker.join();
    scene.stop = true;
    for (std::thread& reader : readers) reader.join();
    scene.pool->check();
    CHECK(scene.pool->stats().evictions > 0);
    check_all_can_go(scene);
  }
}

// More guards than slots: reclamation pauses, and nothing else happens.
void test_more_guards_than_slots() {
  Scene scene(kBackends[0]);
  std::vector<std::unique_ptr<PagePool::ReadGuard>> guards;
  for (int i = 0; i < 300; ++i) {
    guards.push_back(std::make_unique<PagePool::ReadGuard>(*scene.pool));
  }
  const auto sweep = [&scene] {
    for (PageNumber page = 0; page < kPages; ++page) {
      const PageRef wanted{scene.stores[0], page};
      const PinnedPages pinned = scene.pool->fetch(&wanted, 1);
      CHECK(page_matches(pinned.data(0), kPage, 0, page));
    }
    scene.pool->check();
  };
  sweep();
  CHECK(scene.pool->stats().overflow_pages > 0);
  guards.clear();
  sweep();
  const std::uint64_t overflow = scene.pool->stats().overflow_pages;
  sweep();
  CHECK_EQ(scene.pool->stats().overflow_pages, overflow);
}

// All threads miss the same pages at the same moment: each is read once.
void test_concurrent_misses_read_once() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend);
    for (int round = 0; round < 20; ++round) {
      const std::uint64_t before = scene.pool->stats().demand_bytes;
      std::atomic<int> ready{0};
      std::vector<std::thread> threads;
      for (int i = 0; i < 6; ++i) {
        threads.emplace_back([&scene, &ready] {
          std::vector<PageRef> wanted;
          for (PageNumber page = 0; page < 32; page += 2) wanted.push_back({scene.stores[1], page});
          ++ready;
          while (ready.load() < 6) std::this_thread::yield();
          const PinnedPages pinned = scene.pool->fetch(wanted.data(), wanted.size());
          for (std::size_t j = 0; j < wanted.size(); ++j) {
            CHECK(page_matches(pinned.data(j), kPage, 1, wanted[j].page));
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      CHECK_EQ(scene.pool->stats().demand_bytes - before, 16 * kPage);
      std::vector<PageNumber> pages(32);
      std::iota(pages.begin(), pages.end(), 0u);
      CHECK_EQ(scene.pool->evict(scene.stores[1], pages.data(), pages.size()), 16u);
      scene.pool->check();
    }
  }
}

}  // namespace

int main() {
  RUN(test_all_at_once);
  RUN(test_more_guards_than_slots);
  RUN(test_concurrent_misses_read_once);
  return 0;
}
