// The page pool over a device that fails, lies and dawdles.
#include <cerrno>
#include <condition_variable>
#include <mutex>
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
using std::chrono::milliseconds;

namespace {

constexpr std::size_t kPage = 4096;

struct Faults : ReadFaults {
  explicit Faults(std::uint64_t seed = 1) : random(seed) { set_read_faults(this); }
  ~Faults() override { set_read_faults(nullptr); }

  std::chrono::microseconds delay(const ReadRequest& request) noexcept override {
    return request.prefetch ? prefetch_delay.load() : demand_delay.load();
  }

  std::int64_t result(const ReadRequest& request, std::int64_t outcome) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex);
    ++reads;
    const std::uint64_t dice = random() % 100;
    if (dice < error_percent) return -EIO;
    if (dice < error_percent + short_percent) return outcome > 512 ? outcome / 2 : outcome;
    if (dice < error_percent + short_percent + flip_percent && outcome > 0) {
      const iovec& part = request.parts[random() % request.parts.size()];
      static_cast<unsigned char*>(part.iov_base)[random() % part.iov_len] ^= 0x10;
    }
    return outcome;
  }

  std::mutex mutex;
  std::mt19937_64 random;
  std::atomic<std::chrono::microseconds> demand_delay{std::chrono::microseconds(0)};
  std::atomic<std::chrono::microseconds> prefetch_delay{std::chrono::microseconds(0)};
  unsigned error_percent = 0;
  unsigned short_percent = 0;
  unsigned flip_percent = 0;
  std::uint64_t reads = 0;
};

struct Scene {
  Scene(IoBackend backend, std::size_t frames, std::uint32_t pages = 256, unsigned pause_ms = 20) {
    PoolOptions options;
    options.page_bytes = kPage;
    options.budget_bytes = frames * kPage;
    options.backend = backend;
    options.prefetch_pause_ms_max = pause_ms;
    pool = std::make_unique<PagePool>(options);
    store = pool->add_store(folder.write("pages", 7, pages, kPage));
  }

  PinnedPages fetch(const std::vector<PageNumber>& pages, Deadline deadline = {}) {
    std::vector<PageRef> wanted;
    for (const PageNumber page : pages) wanted.push_back({store, page});
    return pool->fetch(wanted.data(), wanted.size(), deadline);
  }

  TestFolder folder;
  std::unique_ptr<PagePool> pool;
  StoreId store = 0;
};

std::vector<PageNumber> numbers(PageNumber first, PageNumber end) {
  std::vector<PageNumber> pages(end - first);
  std::iota(pages.begin(), pages.end(), first);
  return pages;
}

void test_errors_at_every_rate() {
  for (const IoBackend backend : kBackends) {
    for (const unsigned percent : {1u, 10u, 33u, 60u, 100u}) {
      Scene scene(backend, 64);
      Faults faults(percent);
      faults.error_percent = percent;
      faults.short_percent = (100 - percent) / 3;
      std::mt19937_64 random(percent);
      std::uint64_t failed = 0;
      for (int round = 0; round < 40; ++round) {
        std::vector<PageNumber> pages;
        for (int i = 0; i < 10; ++i) pages.push_back(static_cast<PageNumber>(random() % 256));
        const PinnedPages pinned = scene.fetch(pages);
        for (std::size_t i = 0; i < pages.size(); ++i) {
          if (pinned.status(i) == PageStatus::ok) {
            CHECK(page_matches(pinned.data(i), kPage, 7, pages[i]));
          } else {
            CHECK(pinned.status(i) == PageStatus::io_error);
            CHECK(pinned.data(i) == nullptr);
            ++failed;
          }
        }
        const std::vector<PageNumber> run = numbers(static_cast<PageNumber>(round * 6),
                                                    static_cast<PageNumber>(round * 6 + 6));
        LoadOptions options;
        options.evict = true;
        const LoadReport report = scene.pool->load(scene.store, run.data(), run.size(), options);
        CHECK_EQ(report.pages_loaded + report.pages_already + report.pages_failed +
                     report.pages_no_room,
                 run.size());
        scene.pool->check();
      }
      if (percent == 100) CHECK_EQ(failed, 400u);
      if (percent >= 33) CHECK(scene.pool->stats().io_errors > 0);
      // An error of the device is no damage: later reads may succeed.
      CHECK_EQ(scene.pool->store_stats(scene.store).quarantined, 0u);
    }
  }
}

void test_bit_flips_never_reach_a_reader() {
  for (const IoBackend backend : kBackends) {
    for (const unsigned percent : {5u, 50u, 100u}) {
      Scene scene(backend, 64);
      Faults faults(percent);
      faults.flip_percent = percent;
      for (PageNumber page = 0; page + 8 <= 256; page += 8) {
        const PinnedPages pinned = scene.fetch(numbers(page, page + 8));
        for (std::size_t i = 0; i < 8; ++i) {
          if (pinned.status(i) == PageStatus::ok) {
            CHECK(page_matches(pinned.data(i), kPage, 7, page + static_cast<PageNumber>(i)));
          } else {
            CHECK(pinned.status(i) == PageStatus::corrupt);
          }
        }
        scene.pool->check();
      }
      CHECK(scene.pool->stats().checksum_failures > 0);
      if (percent == 100) CHECK(scene.pool->store_stats(scene.store).quarantined > 0);
    }
  }
}

// The first try is spoilt, the second is sound: nobody notices but the counter.
void test_a_passing_flip_is_read_again() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend, 64);
    struct Once : ReadFaults {
      Once() { set_read_faults(this); }
      ~Once() override { set_read_faults(nullptr); }
      std::int64_t result(const ReadRequest& request, std::int64_t outcome) noexcept override {
        if (!done.exchange(true)) static_cast<unsigned char*>(request.parts[0].iov_base)[99] ^= 1;
        return outcome;
      }
      std::atomic<bool> done{false};
    } once;
    const PinnedPages pinned = scene.fetch({3, 4, 5});
    for (std::size_t i = 0; i < 3; ++i) CHECK(pinned.status(i) == PageStatus::ok);
    CHECK_EQ(pinned.reads(), 2u);
    CHECK_EQ(scene.pool->stats().checksum_failures, 1u);
    CHECK_EQ(scene.pool->store_stats(scene.store).quarantined, 0u);
    scene.pool->check();
  }
}

// A deadline gives back what is there; the rest arrives later, in the background, and stays.
void test_deadline_leaves_the_read_to_the_pool() {
  for (const IoBackend backend : kBackends) {
    for (const std::size_t frames : {std::size_t{16}, std::size_t{64}}) {
      for (bool late = true; late;) {
        Scene scene(backend, frames);
        CHECK(scene.fetch({0, 1}).status(0) == PageStatus::ok);
        Faults faults;
        faults.demand_delay = milliseconds(200);
        const auto began = Clock::now();
        PinnedPages pinned = scene.fetch({0, 10, 1, 20, 21, 22}, began);
        // A machine that stood still for as long as reads take has shown nothing: once more.
        late = Clock::now() - began >= milliseconds(200);
        if (late) continue;
        CHECK(pinned.status(0) == PageStatus::ok && pinned.status(2) == PageStatus::ok);
        for (const std::size_t i : {1u, 3u, 4u, 5u}) {
          CHECK(pinned.status(i) == PageStatus::deadline && pinned.data(i) == nullptr);
        }
        CHECK_EQ(pinned.reads(), 2u);
        CHECK_EQ(pinned.reads(), 2u);
        scene.pool->check();
        // Whoever comes next waits for the read that is still out, and starts none.
        faults.demand_delay = milliseconds(0);
        PinnedPages joined = scene.fetch({10, 20, 21, 22});
        for (std::size_t i = 0; i < 4; ++i) {
          CHECK(joined.status(i) == PageStatus::ok);
        }
        CHECK(page_matches(joined.data(3), kPage, 7, 22));
        CHECK_EQ(joined.reads(), 0u);
        CHECK_EQ(scene.pool->stats().demand_reads, 3u);
        scene.pool->check();
        // Those who gave up waiting hold no pin.
        joined.release();
        pinned.release();
        const std::vector<PageNumber> pages = numbers(0, 23);
        CHECK_EQ(scene.pool->evict(scene.store, pages.data(), pages.size()), 6u);
      }
    }
  }
}

// The pool goes while reads are out: it waits for them. (The address sanitizer watches.)
void test_the_end_waits_for_reads() {
  for (const IoBackend backend : kBackends) {
    Faults faults;
    faults.demand_delay = milliseconds(30);
    faults.prefetch_delay = milliseconds(200);
    Scene scene(backend, 32);
    for (PageNumber page = 0; page < 60; page += 10) {
      (void)scene.fetch({page, page + 2}, Clock::now());
    }
    const std::vector<PageNumber> pages = numbers(100, 110);
    LoadOptions options;
    const auto began = Clock::now();
    options.deadline = began + milliseconds(1);
    options.sticky = true;
    const LoadReport report = scene.pool->load(scene.store, pages.data(), pages.size(), options);
    // Where the machine stood still for as long as a read takes, they may have come all the same.
    CHECK(report.pages_not_reached == 10 || Clock::now() - began >= milliseconds(200));
    scene.pool->check();
    scene.pool.reset();
  }
}

void test_removal_waits_for_reads() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend, 32);
    {
      Faults faults;
      faults.demand_delay = milliseconds(20);
      (void)scene.fetch({1, 2, 3, 50}, Clock::now());
      scene.pool->remove_store(scene.store);
      scene.pool->check();
      CHECK_EQ(scene.pool->stats().resident_bytes, 0u);
    }
  }
}

void test_cancel_and_deadline_of_a_load() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend, 256);
    Faults faults;
    faults.prefetch_delay = milliseconds(3);
    const std::vector<PageNumber> pages = numbers(0, 256);
    std::atomic<bool> cancel{true};
    LoadOptions options;
    options.run_bytes_max = 4 * kPage;
    options.cancel = &cancel;
    LoadReport report = scene.pool->load(scene.store, pages.data(), pages.size(), options);
    CHECK_EQ(report.pages_not_reached, 256u);
    CHECK_EQ(report.reads, 0u);
    cancel = false;
    options.deadline = Clock::now();
    report = scene.pool->load(scene.store, pages.data(), pages.size(), options);
    CHECK_EQ(report.pages_not_reached, 256u);
    options.deadline.reset();
    std::thread canceller([&cancel, &scene] {
      while (scene.pool->store_stats(scene.store).resident == 0) std::this_thread::yield();
      cancel = true;
    });
    options.run_bytes_max = kPage;   // so that the bound on bytes holds 256 runs apart
    PoolStats before = scene.pool->stats();
    report = scene.pool->load(scene.store, pages.data(), pages.size(), options);
    canceller.join();
    CHECK_EQ(report.pages_loaded + report.pages_not_reached, 256u);
    CHECK_EQ(scene.pool->stats().prefetch_reads - before.prefetch_reads, report.reads);
    // What was out at the end may have come since.
    CHECK(scene.pool->store_stats(scene.store).resident >= report.pages_loaded);
    // And goes on where it was.
    cancel = false;
    report = scene.pool->load(scene.store, pages.data(), pages.size(), options);
    CHECK_EQ(report.pages_loaded + report.pages_already, 256u);
    scene.pool->check();
  }
}

// While a fetch waits, load() issues nothing; when it ends, the load goes on.
void test_demand_outranks_prefetch() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend, 256, 256, 3'600'000);
    Faults faults;
    faults.demand_delay = milliseconds(50);
    std::thread demand([&scene] {
      const PinnedPages pinned = scene.fetch({200});
      CHECK(pinned.status(0) == PageStatus::ok);
    });
    while (scene.pool->stats().demand_reads == 0) std::this_thread::yield();
    const std::vector<PageNumber> pages = numbers(0, 64);
    LoadOptions options;
    options.deadline = Clock::now() + milliseconds(10);
    LoadReport report = scene.pool->load(scene.store, pages.data(), pages.size(), options);
    // Slow machines may be late for the overlap; what was read then was read after the fetch.
    if (report.pages_loaded > 0) {
      CHECK(scene.pool->residency(scene.store)[200] == 1);
    } else {
      CHECK_EQ(report.pages_not_reached, 64u);
    }
    options.deadline.reset();
    report = scene.pool->load(scene.store, pages.data(), pages.size(), options);
    demand.join();
    CHECK_EQ(report.pages_loaded + report.pages_already, 64u);
    scene.pool->check();
  }
}

// A demand read that lasts until it is let go; loads take as long as they are told.
struct HeldDemand : ReadFaults {
  HeldDemand() { set_read_faults(this); }
  ~HeldDemand() override { set_read_faults(nullptr); }
  std::chrono::microseconds delay(const ReadRequest& request) noexcept override {
    if (request.prefetch) return load_delay.load();
    std::unique_lock<std::mutex> lock(mutex);
    let_go.wait(lock, [this] { return open; });
    return std::chrono::microseconds(0);
  }
  void release() {
    const std::lock_guard<std::mutex> lock(mutex);
    open = true;
    let_go.notify_all();
  }

  std::mutex mutex;
  std::condition_variable let_go;
  bool open = false;
  std::atomic<std::chrono::microseconds> load_delay{std::chrono::microseconds(0)};
};

// While one read lasts for as long as it likes, everybody else goes on: no lock is held over it. With
// one, this would not end.
void test_no_lock_is_held_over_a_read() {
  TestFolder folder;
  PoolOptions options;
  options.page_bytes = kPage;
  options.budget_bytes = 64 * kPage;
  options.backend = IoBackend::threads;
  PagePool pool(options);
  const StoreId held = pool.add_store(folder.write("held", 7, 100, kPage));
  const StoreId other = pool.add_store(folder.write("other", 8, 100, kPage));
  struct HeldStore : ReadFaults {
    HeldStore() { set_read_faults(this); }
    ~HeldStore() override { set_read_faults(nullptr); }
    std::chrono::microseconds delay(const ReadRequest& request) noexcept override {
      const std::string& path = request.file->path();
      if (path.substr(path.rfind('/')) != "/held") return std::chrono::microseconds(0);
      std::unique_lock<std::mutex> lock(mutex);
      let_go.wait(lock, [this] { return open; });
      return std::chrono::microseconds(0);
    }
    std::mutex mutex;
    std::condition_variable let_go;
    bool open = false;
  } faults;
  std::thread reader([&pool, held] {
    const PageRef wanted{held, 3};
    CHECK(pool.fetch(&wanted, 1).status(0) == PageStatus::ok);
  });
  while (pool.stats().demand_reads == 0) std::this_thread::yield();
  const PageRef wanted{other, 5};
  CHECK(pool.fetch(&wanted, 1).status(0) == PageStatus::ok);   // a miss
  CHECK(pool.fetch(&wanted, 1).status(0) == PageStatus::ok);   // a hit
  const std::vector<PageNumber> pages = numbers(10, 20);
  LoadOptions load;
  load.deadline = Clock::now() + std::chrono::milliseconds(20);   // it makes way for the held read
  const LoadReport report = pool.load(other, pages.data(), pages.size(), load);
  CHECK_EQ(report.pages_loaded + report.pages_not_reached, pages.size());
  (void)pool.residency(other);
  (void)pool.evict(other, &wanted.page, 1);
  pool.unstick(other, pages.data(), pages.size());
  pool.set_budget(32 * kPage);
  pool.remove_store(pool.add_store(folder.write("third", 9, 10, kPage)));
  pool.check();
  CHECK_EQ(pool.store_stats(held).demand_pages, 0u);
  {
    const std::lock_guard<std::mutex> lock(faults.mutex);
    faults.open = true;
    faults.let_go.notify_all();
  }
  reader.join();
  pool.check();
}

// What a load of 64 pages brings while demand waits, after the pool has seen the device at work.
LoadReport load_beside_demand(std::chrono::microseconds delay, milliseconds time) {
  TestFolder folder("/dev/shm");
  PoolOptions options;
  options.page_bytes = kPage;
  options.budget_bytes = 512 * kPage;
  options.backend = IoBackend::threads;
  options.direct = false;
  options.prefetch_inflight_bytes_max = 64 * kPage;
  options.prefetch_pause_ms_max = 3'600'000;
  PagePool pool(options);
  const StoreId store = pool.add_store(folder.write("pages", 7, 500, kPage));
  HeldDemand faults;
  faults.load_delay = delay;
  const std::vector<PageNumber> seen = numbers(0, 400);
  CHECK_EQ(pool.load(store, seen.data(), seen.size(), {}).pages_loaded, 400u);
  std::thread demand([&pool, store] {
    const PageRef wanted{store, 499};
    CHECK(pool.fetch(&wanted, 1).status(0) == PageStatus::ok);
  });
  while (pool.stats().demand_reads == 0) std::this_thread::yield();
  const std::vector<PageNumber> pages = numbers(401, 465);
  LoadOptions load;
  load.deadline = Clock::now() + time;
  const LoadReport report = pool.load(store, pages.data(), pages.size(), load);
  CHECK_EQ(report.pages_loaded + report.pages_not_reached, 64u);
  CHECK_EQ(pool.store_stats(store).demand_pages, 0u);
  faults.release();
  demand.join();
  pool.check();
  return report;
}

// A device that was seen to be fast goes on loading while demand waits; a slow one does not.
void test_only_a_fast_device_loads_beside_demand() {
  CHECK_EQ(load_beside_demand(milliseconds(20), milliseconds(60)).pages_loaded, 0u);
  // Where the machine is busy, even memory may look slow now and then; not every time.
  std::uint64_t loaded = 0;
  for (int tries = 0; tries < 30 && loaded < 64; ++tries) {
    loaded = load_beside_demand(milliseconds(0), milliseconds(1000)).pages_loaded;
  }
  CHECK_EQ(loaded, 64u);
}

// Under demand without end, load() still trickles.
void test_prefetch_ends_under_endless_demand() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend, 128, 256, 2);
    Faults faults;
    faults.demand_delay = milliseconds(1);
    std::atomic<bool> stop{false};
    std::vector<std::thread> demand;
    for (std::uint64_t i = 0; i < 3; ++i) {
      demand.emplace_back([&scene, &stop, i] {
        std::mt19937_64 random(i);
        while (!stop) (void)scene.fetch({static_cast<PageNumber>(100 + random() % 156)});
      });
    }
    const std::vector<PageNumber> pages = numbers(0, 64);
    LoadOptions options;
    options.evict = true;
    options.sticky = true;
    const LoadReport report = scene.pool->load(scene.store, pages.data(), pages.size(), options);
    stop = true;
    for (std::thread& thread : demand) thread.join();
    CHECK_EQ(report.pages_loaded, 64u);
    scene.pool->check();
  }
}

// A fetch and a load want the same pages: one read each, both are served.
void test_loads_and_fetches_share_reads() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend, 128);
    Faults faults;
    faults.demand_delay = milliseconds(15);
    std::thread demand([&scene] { (void)scene.fetch({5, 6, 30}); });
    while (scene.pool->stats().demand_reads == 0) std::this_thread::yield();
    const std::vector<PageNumber> pages = numbers(0, 40);
    LoadOptions options;
    options.sticky = true;
    const LoadReport report = scene.pool->load(scene.store, pages.data(), pages.size(), options);
    demand.join();
    CHECK_EQ(report.pages_loaded, 37u);
    CHECK_EQ(report.pages_already, 3u);
    CHECK_EQ(scene.pool->store_stats(scene.store).sticky, 40u);
    const PoolStats stats = scene.pool->stats();
    CHECK_EQ(stats.demand_bytes + stats.prefetch_bytes, 40 * kPage);
    scene.pool->check();
  }
}

}  // namespace

int main() {
  RUN(test_errors_at_every_rate);
  RUN(test_bit_flips_never_reach_a_reader);
  RUN(test_a_passing_flip_is_read_again);
  RUN(test_deadline_leaves_the_read_to_the_pool);
  RUN(test_the_end_waits_for_reads);
  RUN(test_removal_waits_for_reads);
  RUN(test_cancel_and_deadline_of_a_load);
  RUN(test_no_lock_is_held_over_a_read);
  RUN(test_demand_outranks_prefetch);
  RUN(test_only_a_fast_device_loads_beside_demand);
  RUN(test_prefetch_ends_under_endless_demand);
  RUN(test_loads_and_fetches_share_reads);
  return 0;
}
