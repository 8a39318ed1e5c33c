// The page pool where memory runs out in the middle: a call may fail, but nothing that it began
// stays behind. No page is pending for ever, none stays pinned, and nobody waits in vain.
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <thread>
#include <utility>

#include "check.hpp"
#include "page_files.hpp"
#include "stoker/errors.hpp"

namespace {

// Allocations until one fails: of this thread, and of every thread. Below 0: none does.
thread_local long own_left = -1;
std::atomic<long> all_left{-1};

bool strikes() noexcept {
  if (own_left >= 0 && own_left-- == 0) return true;
  return all_left.load(std::memory_order_relaxed) >= 0 && all_left.fetch_sub(1) == 0;
}

void* allocate(std::size_t bytes, std::size_t alignment) noexcept {
  if (strikes()) return nullptr;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes == 0 ? 1 : bytes);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  if (void* memory = allocate(bytes, alignment)) return memory;
  throw std::bad_alloc();
}

// Out of line, or GCC sees free() meet what it takes for the library's own operator new, and warns.
[[gnu::noinline]] void release(void* memory) noexcept { std::free(memory); }

}  // namespace

void* operator new(std::size_t bytes) { return allocate_or_throw(bytes, 1); }
void* operator new[](std::size_t bytes) { return allocate_or_throw(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes, 1); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }

using namespace stoker;
using stoker::testing::kBackends;
using stoker::testing::page_matches;
using stoker::testing::TestFolder;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::uint32_t kPages = 128;
constexpr std::size_t kFrames = 32;

struct Faults : ReadFaults {
  Faults() { set_read_faults(this); }
  ~Faults() override { set_read_faults(nullptr); }
  std::chrono::microseconds delay(const ReadRequest&) noexcept override { return slow; }
  std::int64_t result(const ReadRequest& request, std::int64_t outcome) noexcept override {
    return shorten && outcome > 512 && request.repeats == 0 ? 512 : outcome;
  }
  std::atomic<std::chrono::microseconds> slow{std::chrono::microseconds(0)};
  std::atomic<bool> shorten{false};
};

struct Scene {
  explicit Scene(IoBackend backend) {
    PoolOptions options;
    options.page_bytes = kPage;
    options.budget_bytes = kFrames * kPage;
    options.backend = backend;
    options.io_threads = 2;
    pool = std::make_unique<PagePool>(options);
    StoreSpec spec = TestFolder::with_table(folder.write("pages", 7, kPages, kPage), kPage);
    spec.cluster_pages = 4;
    store = pool->add_store(spec);
  }

  PinnedPages fetch(const std::vector<PageNumber>& pages, Deadline deadline = {}) {
    std::vector<PageRef> wanted;
    for (const PageNumber page : pages) wanted.push_back({store, page});
    return pool->fetch(wanted.data(), wanted.size(), deadline);
  }

  // Whatever failed before: every page can be had, and then goes.
  void check_all_is_well() {
    pool->check();
    for (PageNumber first = 0; first < kPages; first += 16) {
      std::vector<PageNumber> pages(16);
      std::iota(pages.begin(), pages.end(), first);
      const PinnedPages pinned = fetch(pages, Clock::now() + seconds(20));
      for (std::size_t i = 0; i < pages.size(); ++i) {
        CHECK(pinned.status(i) == PageStatus::ok);
        CHECK(page_matches(pinned.data(i), kPage, 7, pages[i]));
      }
    }
    empty();
  }

  void empty() {
    std::vector<PageNumber> pages(kPages);
    std::iota(pages.begin(), pages.end(), 0u);
    pool->unstick(store, pages.data(), pages.size());
    pool->evict(store, pages.data(), pages.size());
    CHECK_EQ(pool->stats().resident_bytes, 0u);   // nothing is pinned
    pool->check();
  }

  TestFolder folder;
  std::unique_ptr<PagePool> pool;
  StoreId store = 0;
};

// Calls body with the first allocation failing, the second, and so on, until none does.
template <class Body>
int at_every_allocation(std::atomic<long>* shared, Body&& body) {
  for (long nth = 0;; ++nth) {
    CHECK(nth < 5000);
    body(nth);
    const long left = shared != nullptr ? shared->exchange(-1) : std::exchange(own_left, -1L);
    if (left >= 0) return static_cast<int>(nth);
  }
}

// Runs the call with this thread's nth allocation failing; what it throws is no fault.
template <class Call>
void starved(long nth, Call&& call) {
  own_left = nth;
  try {
    call();
  } catch (const std::bad_alloc&) {
  }
}

// While it lives this thread's allocations succeed; then they count on where they were.
struct Spared {
  ~Spared() { own_left = left; }
  const long left = std::exchange(own_left, -1L);
};

void test_a_fetch_that_fails_leaves_nothing() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend);
    const std::vector<PageNumber> pages = {1, 1, 2, 40, 77, 3, 41, 90, 91, 120};
    const int places = at_every_allocation(nullptr, [&](long nth) {
      std::vector<PageRef> wanted;
      for (const PageNumber page : pages) wanted.push_back({scene.store, page});
      starved(nth, [&] { (void)scene.pool->fetch(wanted.data(), wanted.size()); });
      const Spared spared;
      scene.check_all_is_well();
    });
    CHECK(places > 10);
  }
}

// As above, with every frame in use: frames are evicted, and more is wanted than there are.
void test_a_fetch_of_a_full_pool_leaves_nothing() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend);
    std::vector<PageNumber> held(8);
    std::iota(held.begin(), held.end(), 16u);
    std::vector<PageRef> wanted;
    for (PageNumber page = 40; page < 80; ++page) wanted.push_back({scene.store, page});
    (void)at_every_allocation(nullptr, [&](long nth) {
      {
        const PinnedPages pinned = scene.fetch(held);
        (void)scene.fetch({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99,
                           100, 101, 102, 103});
        starved(nth, [&] { (void)scene.pool->fetch(wanted.data(), wanted.size()); });
        const Spared spared;
        scene.pool->check();
      }
      const Spared spared;
      scene.check_all_is_well();
    });
  }
}

// One thread waits for what another reads, and fails while it does: the other's pages are not
// held for it any longer, and nobody tells it that they have come.
void test_who_fails_to_wait_is_not_waited_for() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend);
    Faults faults;
    faults.slow = milliseconds(6);
    (void)at_every_allocation(nullptr, [&](long nth) {
      const std::uint64_t before = scene.pool->stats().demand_reads;
      std::thread reader([&] {
        const PinnedPages pinned = scene.fetch({8, 50, 70});
        for (std::size_t i = 0; i < 3; ++i) CHECK(pinned.status(i) == PageStatus::ok);
      });
      while (scene.pool->stats().demand_reads < before + 3) std::this_thread::yield();
      const PageRef wanted[] = {{scene.store, 50}, {scene.store, 70}, {scene.store, 8}};
      starved(nth, [&] { (void)scene.pool->fetch(wanted, 3); });
      reader.join();
      const Spared spared;
      scene.empty();
    });
    faults.slow = milliseconds(0);
    scene.check_all_is_well();
  }
}

void test_a_load_that_fails_leaves_nothing() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend);
    const std::vector<PageNumber> pages = {0, 1, 2, 3, 9, 10, 33, 34, 35, 60, 90};
    LoadOptions options;
    options.evict = true;
    options.sticky = true;
    const int places = at_every_allocation(nullptr, [&](long nth) {
      starved(nth, [&] {
        (void)scene.pool->load(scene.store, pages.data(), pages.size(), options);
      });
      const Spared spared;
      scene.empty();
      const LoadReport again = scene.pool->load(scene.store, pages.data(), pages.size(), options);
      CHECK_EQ(again.pages_loaded, pages.size());
      scene.empty();
    });
    CHECK(places > 10);
    scene.check_all_is_well();
  }
}

// Beside a fetch that is under way, for whose pages the load waits.
void test_a_load_beside_a_fetch_leaves_nothing() {
  for (const IoBackend backend : kBackends) {
    Scene scene(backend);
    Faults faults;
    faults.slow = milliseconds(5);
    const std::vector<PageNumber> pages = {8, 9, 20, 30, 50, 51};
    (void)at_every_allocation(nullptr, [&](long nth) {
      const std::uint64_t before = scene.pool->stats().demand_reads;
      std::thread reader([&] { (void)scene.fetch({8, 50}); });
      while (scene.pool->stats().demand_reads < before + 2) std::this_thread::yield();
      starved(nth, [&] { (void)scene.pool->load(scene.store, pages.data(), pages.size(), {}); });
      reader.join();
      const Spared spared;
      scene.empty();
    });
    faults.slow = milliseconds(0);
    scene.check_all_is_well();
  }
}

// Short reads, the table of checksums, and reads that outlive their caller need memory in whatever
// thread is at it: a page may then come with an error, and no more.
void test_any_thread_may_run_out() {
  for (const IoBackend backend : kBackends) {
    for (const bool late : {false, true}) {
      (void)at_every_allocation(&all_left, [&](long nth) {
        Scene scene(backend);
        Faults faults;
        faults.shorten = true;
        faults.slow = milliseconds(late ? 2 : 0);
        const PageRef wanted[] = {{scene.store, 5}, {scene.store, 6}, {scene.store, 30}};
        const Deadline deadline = Clock::now() + (late ? milliseconds(0) : milliseconds(20'000));
        all_left = nth;
        try {
          const PinnedPages pinned = scene.pool->fetch(wanted, 3, deadline);
          for (std::size_t i = 0; i < 3; ++i) {
            const PageStatus status = pinned.status(i);
            CHECK(status == PageStatus::ok || status == PageStatus::io_error ||
                  (late && status == PageStatus::deadline));
          }
          if (late) (void)scene.pool->fetch(wanted, 3);   // until the background has read them
        } catch (const std::bad_alloc&) {
        }
        const long left = all_left.exchange(-1);
        faults.shorten = false;
        faults.slow = milliseconds(0);
        scene.check_all_is_well();
        CHECK_EQ(scene.pool->store_stats(scene.store).quarantined, 0u);
        scene.pool->remove_store(scene.store);   // waits for what is pending
        all_left = left;
      });
    }
  }
}

}  // namespace

int main() {
  RUN(test_a_fetch_that_fails_leaves_nothing);
  RUN(test_a_fetch_of_a_full_pool_leaves_nothing);
  RUN(test_who_fails_to_wait_is_not_waited_for);
  RUN(test_a_load_that_fails_leaves_nothing);
  RUN(test_a_load_beside_a_fetch_leaves_nothing);
  RUN(test_any_thread_may_run_out);
  return 0;
}
