// The page pool, one behaviour at a time.
#include <chrono>
#include <cstdio>
#include <numeric>

#include "check.hpp"
#include "page_files.hpp"
#include "stoker/errors.hpp"

using namespace stoker;
using stoker::testing::page_matches;
using stoker::testing::TestFolder;

namespace {

constexpr std::size_t kPage = 4096;

PoolOptions options_for(std::size_t frames, IoBackend backend = IoBackend::automatic,
                        std::size_t page_bytes = kPage) {
  PoolOptions options;
  options.page_bytes = page_bytes;
  options.budget_bytes = frames * page_bytes;
  options.backend = backend;
  return options;
}

std::vector<PageNumber> numbers(PageNumber first, PageNumber end) {
  std::vector<PageNumber> pages(end - first);
  std::iota(pages.begin(), pages.end(), first);
  return pages;
}

void fetch_and_compare(PagePool& pool, StoreId store, std::uint64_t salt,
                       const std::vector<PageNumber>& pages, std::size_t page_bytes = kPage) {
  std::vector<PageRef> wanted;
  for (const PageNumber page : pages) wanted.push_back({store, page});
  const PinnedPages pinned = pool.fetch(wanted.data(), wanted.size());
  CHECK_EQ(pinned.size(), pages.size());
  for (std::size_t i = 0; i < pages.size(); ++i) {
    CHECK(pinned.status(i) == PageStatus::ok);
    CHECK(page_matches(pinned.data(i), page_bytes, salt, pages[i]));
  }
}

void test_fetch_reads_once_and_hits_after() {
  for (const IoBackend backend : {IoBackend::automatic, IoBackend::threads}) {
    TestFolder folder;
    PagePool pool(options_for(64, backend));
    const StoreId store = pool.add_store(folder.write("a", 1, 100, kPage, 8192));
    fetch_and_compare(pool, store, 1, {5, 99, 7, 6, 5, 0});
    CHECK_EQ(pool.stats().demand_reads, 3u);   // 0, 5-7, 99
    CHECK_EQ(pool.stats().demand_bytes, 5 * kPage);
    fetch_and_compare(pool, store, 1, {0, 5, 6, 7, 99});
    CHECK_EQ(pool.stats().demand_reads, 3u);
    CHECK_EQ(pool.store_stats(store).resident, 5u);
    const PagePool::View view = pool.view(store);
    {
      const PagePool::ReadGuard guard(pool);
      CHECK(view.peek(1) == nullptr);
      CHECK(page_matches(view.touch(99), kPage, 1, 99));
    }
    pool.check();
  }
}

// More reads than a ring holds at once are handed on by polls alone, as earlier ones arrive.
void test_polls_bring_all_of_a_large_fetch() {
  for (const IoBackend backend : stoker::testing::kBackends) {
    TestFolder folder;
    PagePool pool(options_for(400, backend));
    const StoreId store = pool.add_store(folder.write("a", 3, 800, kPage));
    std::vector<PageRef> wanted;
    for (PageNumber page = 0; page < 800; page += 2) wanted.push_back({store, page});
    PendingPages pending = pool.begin_fetch(wanted.data(), wanted.size());
    pending.issue();
    const auto patience = Clock::now() + std::chrono::seconds(60);
    while (!pending.poll()) CHECK(Clock::now() < patience);
    const PinnedPages got = pending.finish(Clock::now());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      CHECK(got.is_read(i));
      CHECK(page_matches(got.data(i), kPage, 3, wanted[i].page));
    }
    CHECK_EQ(got.reads(), wanted.size());
  }
}

void test_overflow_comes_in_private_buffers() {
  TestFolder folder;
  PagePool pool(options_for(16));
  const StoreId store = pool.add_store(folder.write("a", 2, 200, kPage));
  std::vector<PageRef> wanted;
  for (PageNumber page = 0; page < 200; page += 2) wanted.push_back({store, page});
  const PinnedPages pinned = pool.fetch(wanted.data(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    CHECK(pinned.status(i) == PageStatus::ok);
    CHECK(page_matches(pinned.data(i), kPage, 2, wanted[i].page));
  }
  CHECK_EQ(pool.stats().resident_bytes, 16 * kPage);
  CHECK_EQ(pool.stats().overflow_pages, 84u);
  pool.check();
}

void test_eviction_keeps_the_budget() {
  TestFolder folder;
  PagePool pool(options_for(16));
  const StoreId a = pool.add_store(folder.write("a", 3, 64, kPage));
  const StoreId b = pool.add_store(folder.write("b", 4, 64, kPage));
  for (PageNumber page = 0; page < 64; ++page) {
    fetch_and_compare(pool, a, 3, {page});
    fetch_and_compare(pool, b, 4, {page, 63 - page});
    pool.check();
  }
  CHECK(pool.stats().resident_bytes <= 16 * kPage);
  CHECK_EQ(pool.stats().overflow_pages, 0u);
}

void test_a_guard_keeps_frames_from_reuse() {
  TestFolder folder;
  PagePool pool(options_for(16));
  const StoreId store = pool.add_store(folder.write("a", 5, 64, kPage));
  fetch_and_compare(pool, store, 5, {0});
  const PagePool::View view = pool.view(store);
  const PageNumber zero = 0;
  {
    const PagePool::ReadGuard guard(pool);
    const std::byte* seen = view.peek(0);
    CHECK_EQ(pool.evict(store, &zero, 1), 1u);
    CHECK(view.peek(0) == nullptr);
    for (PageNumber page = 1; page < 64; ++page) fetch_and_compare(pool, store, 5, {page});
    CHECK(page_matches(seen, kPage, 5, 0));
    pool.check();
  }
  for (PageNumber page = 1; page < 64; ++page) fetch_and_compare(pool, store, 5, {page});
  pool.check();
}

void test_load_merges_and_sticks() {
  for (const IoBackend backend : {IoBackend::automatic, IoBackend::threads}) {
    TestFolder folder;
    PagePool pool(options_for(256, backend));
    const StoreId store = pool.add_store(folder.write("a", 6, 400, kPage));
    fetch_and_compare(pool, store, 6, {10});
    LoadOptions options;
    options.sticky = true;
    std::vector<PageNumber> pages = numbers(0, 100);
    LoadReport report = pool.load(store, pages.data(), pages.size(), options);
    CHECK_EQ(report.pages_loaded, 99u);
    CHECK_EQ(report.pages_already, 1u);
    CHECK(report.reads >= 2 && report.reads <= 5);   // shorter runs, since demand was about
    CHECK_EQ(report.bytes_read, 99 * kPage);
    CHECK_EQ(pool.store_stats(store).sticky, 100u);
    pool.check();
    for (PageNumber page = 100; page < 400; page += 10) {
      fetch_and_compare(pool, store, 6, numbers(page, page + 10));
    }
    CHECK_EQ(pool.store_stats(store).sticky, 100u);
    const std::vector<std::uint8_t> states = pool.residency(store);
    for (PageNumber page = 0; page < 100; ++page) CHECK(states[page] == 2);
    pool.unstick(store, pages.data(), pages.size());
    CHECK_EQ(pool.evict(store, pages.data(), pages.size()), 100u);
    pool.check();
    pages = numbers(0, 400);
    LoadOptions plain;
    report = pool.load(store, pages.data(), pages.size(), plain);
    CHECK_EQ(report.pages_loaded + report.pages_already + report.pages_no_room, 400u);
    CHECK_EQ(report.pages_no_room, 144u);
    plain.evict = true;
    pages = numbers(300, 400);
    report = pool.load(store, pages.data(), pages.size(), plain);
    CHECK_EQ(report.pages_no_room, 0u);
    pool.check();
  }
}

void test_prefetch_accounting() {
  TestFolder folder;
  PagePool pool(options_for(32));
  const StoreId store = pool.add_store(folder.write("a", 7, 32, kPage));
  const std::vector<PageNumber> pages = numbers(0, 32);
  CHECK_EQ(pool.load(store, pages.data(), pages.size(), {}).pages_loaded, 32u);
  const PagePool::View view = pool.view(store);
  {
    const PagePool::ReadGuard guard(pool);
    for (PageNumber page = 0; page < 8; ++page) CHECK(view.touch(page) != nullptr);
  }
  fetch_and_compare(pool, store, 7, {8, 9});
  StoreStats stats = pool.store_stats(store);
  CHECK_EQ(stats.prefetched_pages, 32u);
  CHECK_EQ(stats.prefetched_useful, 10u);
  CHECK_EQ(stats.prefetched_unused, 0u);
  CHECK_EQ(pool.evict(store, pages.data(), pages.size()), 32u);
  stats = pool.store_stats(store);
  CHECK_EQ(stats.prefetched_useful, 10u);
  CHECK_EQ(stats.prefetched_unused, 22u);
  pool.check();
}

void test_budget_moves() {
  TestFolder folder;
  PagePool pool(options_for(64));
  const StoreId store = pool.add_store(folder.write("a", 8, 64, kPage));
  const std::vector<PageNumber> pages = numbers(0, 64);
  LoadOptions sticky;
  sticky.sticky = true;
  pool.load(store, pages.data(), 20, sticky);
  pool.load(store, pages.data(), 64, {});
  CHECK_EQ(pool.stats().resident_bytes, 64 * kPage);
  pool.set_budget(24 * kPage);
  CHECK_EQ(pool.stats().resident_bytes, 24 * kPage);
  pool.check();
  CHECK_THROWS(pool.set_budget(19 * kPage), StoreError, "20");
  CHECK_THROWS(pool.set_budget(3 * kPage), BadInput, "16");
  pool.check();
  fetch_and_compare(pool, store, 8, pages);
  CHECK(pool.stats().resident_bytes <= 24 * kPage);
  pool.set_budget(1000 * kPage);
  CHECK_EQ(pool.stats().budget_bytes, 64 * kPage);
  fetch_and_compare(pool, store, 8, pages);
  CHECK_EQ(pool.stats().resident_bytes, 64 * kPage);
  pool.check();
}

void test_stores_come_and_go() {
  TestFolder folder;
  PagePool pool(options_for(32));
  const StoreId a = pool.add_store(folder.write("a", 9, 32, kPage));
  const StoreId b = pool.add_store(folder.write("b", 10, 32, kPage));
  const PageRef held[] = {{a, 1}, {a, 2}};
  {
    const PinnedPages pinned = pool.fetch(held, 2);
    fetch_and_compare(pool, b, 10, {3});
    pool.remove_store(a);
    pool.check();
    CHECK(page_matches(pinned.data(0), kPage, 9, 1));
    CHECK(page_matches(pinned.data(1), kPage, 9, 2));
    fetch_and_compare(pool, b, 10, numbers(0, 32));
    CHECK(page_matches(pinned.data(0), kPage, 9, 1));
    pool.check();
  }
  CHECK_THROWS(pool.fetch(held, 1), BadInput, "not in the pool");
  CHECK(pool.view(a).table == nullptr);
  fetch_and_compare(pool, b, 10, numbers(0, 32));
  CHECK_EQ(pool.store_stats(b).resident, 32u);
  pool.check();
}

void test_damage_is_quarantined() {
  TestFolder folder;
  PagePool pool(options_for(64));
  const StoreSpec spec = folder.write("a", 11, 64, kPage);
  TestFolder::damage(spec, kPage, 6);
  TestFolder::damage(spec, kPage, 40);
  const StoreId store = pool.add_store(spec);
  const PageRef wanted[] = {{store, 5}, {store, 6}, {store, 7}, {store, 6}};
  for (int round = 0; round < 2; ++round) {
    const PinnedPages pinned = pool.fetch(wanted, 4);
    CHECK(pinned.status(0) == PageStatus::ok && page_matches(pinned.data(0), kPage, 11, 5));
    CHECK(pinned.status(1) == PageStatus::corrupt && pinned.data(1) == nullptr);
    CHECK(pinned.status(2) == PageStatus::ok && page_matches(pinned.data(2), kPage, 11, 7));
    CHECK(pinned.status(3) == PageStatus::corrupt);
    CHECK_EQ(pinned.reads(), round == 0 ? 2u : 0u);
  }
  const std::vector<PageNumber> pages = numbers(0, 64);
  const LoadReport report = pool.load(store, pages.data(), 64, {});
  CHECK_EQ(report.pages_failed, 2u);
  CHECK_EQ(report.pages_loaded, 60u);
  CHECK_EQ(pool.store_stats(store).quarantined, 2u);
  CHECK_EQ(pool.stats().checksum_failures, 4u);
  CHECK_EQ(static_cast<int>(pool.residency(store)[40]), 3);
  pool.check();
}

void test_a_table_is_read_when_it_is_needed() {
  TestFolder folder;
  PagePool pool(options_for(64));
  const StoreSpec spec = TestFolder::with_table(folder.write("a", 21, 300, kPage, 4096), kPage);
  const StoreId store = pool.add_store(spec);
  fetch_and_compare(pool, store, 21, numbers(100, 140));
  pool.check();
  TestFolder::damage(spec, kPage, 250);
  const PageRef bad{store, 250};
  CHECK(pool.fetch(&bad, 1).status(0) == PageStatus::corrupt);
  // A table that is not the one promised, or not there: every page counts as damaged.
  for (const bool cut : {false, true}) {
    StoreSpec other = TestFolder::with_table(folder.write(cut ? "c" : "b", 22, 50, kPage), kPage);
    if (cut) {
      CHECK(::truncate(other.path.c_str(), static_cast<off_t>(other.table_offset_bytes + 8)) == 0);
    } else {
      other.table_crc ^= 1;
    }
    const StoreId hurt = pool.add_store(other);
    const PageRef first{hurt, 0};
    CHECK(pool.fetch(&first, 1).status(0) == PageStatus::corrupt);
    const std::vector<PageNumber> pages = numbers(0, 50);
    CHECK_EQ(pool.load(hurt, pages.data(), 50, {}).pages_loaded, 0u);
  }
  pool.check();
}

// Both are one wait: the table is there once a fetch has begun, however late its pages come.
void test_a_table_comes_while_the_first_pages_do() {
  TestFolder folder;
  PagePool pool(options_for(64));
  const StoreSpec spec = TestFolder::with_table(folder.write("a", 26, 1100, kPage, 4096), kPage);
  const StoreId store = pool.add_store(spec);
  const PageRef wanted{store, 7};
  PendingPages pending = pool.begin_fetch(&wanted, 1);
  CHECK(::truncate(spec.path.c_str(), static_cast<off_t>(spec.table_offset_bytes)) == 0);
  const PinnedPages pinned = pending.finish(Deadline());
  CHECK(pinned.status(0) == PageStatus::ok && page_matches(pinned.data(0), kPage, 26, 7));
  pool.check();
}

// A store is the file that was opened, whatever its path names by now, as far as its table goes too.
void test_a_table_is_that_of_the_file_that_was_opened() {
  TestFolder folder;
  for (const bool direct : {false, true}) {
    for (const bool replaced : {false, true}) {
      PoolOptions options = options_for(64);
      options.direct = direct;
      PagePool pool(options);
      // More than one sector of checksums.
      const StoreSpec spec =
          TestFolder::with_table(folder.write("a", 24, 1100, kPage, 4096), kPage);
      const StoreId store = pool.add_store(spec);
      CHECK(::unlink(spec.path.c_str()) == 0);
      if (replaced) (void)TestFolder::with_table(folder.write("a", 25, 1100, kPage, 4096), kPage);
      fetch_and_compare(pool, store, 24, numbers(1070, 1100));
      pool.check();
    }
  }
}

void test_a_miss_brings_its_cluster_while_there_is_room() {
  TestFolder folder;
  PagePool pool(options_for(64));
  StoreSpec spec = folder.write("a", 23, 99, kPage);
  spec.cluster_pages = 8;
  const StoreId store = pool.add_store(spec);
  TestFolder::damage(spec, kPage, 12);
  {
    const PageRef wanted[] = {{store, 10}, {store, 98}};
    const PinnedPages pinned = pool.fetch(wanted, 2);
    CHECK(page_matches(pinned.data(0), kPage, 23, 10) && page_matches(pinned.data(1), kPage, 23, 98));
    // The damaged page is read twice, and is nobody's loss yet.
    CHECK_EQ(pinned.bytes_read(), (8 + 3 + 1) * kPage);
    CHECK(pinned.read_around());
  }
  const auto resident = [&](PageNumber page) { return pool.residency(store)[page] == 1; };
  for (PageNumber page = 8; page < 16; ++page) CHECK(resident(page) == (page != 12));
  CHECK(resident(96) && resident(97) && !resident(95) && !resident(7));
  CHECK_EQ(pool.store_stats(store).prefetched_pages, 8u);
  CHECK_EQ(pool.store_stats(store).quarantined, 1u);
  fetch_and_compare(pool, store, 23, numbers(16, 60));
  const std::uint64_t brought = pool.store_stats(store).prefetched_pages;
  const PageRef more{store, 0};   // the pool is full by now: a miss brings itself alone
  {
    const PinnedPages alone = pool.fetch(&more, 1);
    CHECK_EQ(alone.bytes_read(), kPage);
    CHECK(!alone.read_around());
  }
  CHECK(!pool.fetch(&more, 1).read_around());   // there by now
  CHECK_EQ(pool.store_stats(store).prefetched_pages, brought);
  pool.check();
}

void test_a_miss_with_a_near_deadline_brings_a_small_cluster() {
  TestFolder folder;
  PagePool pool(options_for(256));
  StoreSpec spec = folder.write("a", 24, 100, kPage);
  spec.cluster_pages = 32;
  const StoreId store = pool.add_store(spec);
  const PageRef wanted{store, 45};
  const PinnedPages hurried = pool.fetch(&wanted, 1, Clock::now() + std::chrono::milliseconds(50));
  CHECK(!hurried.read_around());
  CHECK_EQ(hurried.bytes_read(), 8 * kPage);   // 40-47, in time or not
  const PageRef later{store, 64};
  const PinnedPages calm = pool.fetch(&later, 1, Clock::now() + std::chrono::hours(1));
  CHECK(calm.read_around());
  CHECK_EQ(calm.bytes_read(), 32 * kPage);
  pool.check();
}

void test_small_pages_and_wrong_input() {
  TestFolder folder;
  PagePool pool(options_for(64, IoBackend::automatic, 512));
  const StoreSpec spec = folder.write("a", 12, 50, 512, 4096);
  const StoreId store = pool.add_store(spec);
  fetch_and_compare(pool, store, 12, numbers(0, 50), 512);
  pool.check();
  StoreSpec longer = spec;
  longer.page_count = 51;
  longer.checksums.push_back(0);
  CHECK_THROWS(pool.add_store(longer), StoreError, "51 pages end at byte");
  longer.checksums.pop_back();
  CHECK_THROWS(pool.add_store(longer), BadInput, "checksums");
  StoreSpec missing = spec;
  missing.path += ".gone";
  CHECK_THROWS(pool.add_store(missing), StoreError, "No such file");
  missing.path = folder.path();
  CHECK_THROWS(pool.add_store(missing), StoreError, "regular");
  const PageRef beyond{store, 50};
  CHECK_THROWS(pool.fetch(&beyond, 1), BadInput, "page 50");
  const PageNumber falling[] = {3, 2};
  CHECK_THROWS(pool.load(store, falling, 2, {}), BadInput, "rise");
  CHECK_THROWS(PagePool(options_for(15)), BadInput, "15 frames");
  CHECK_THROWS(PagePool(options_for(15, IoBackend::automatic, 1000)), BadInput, "512");
  pool.check();
}

void test_without_direct_io() {
  TestFolder folder("/dev/shm");
  PoolOptions options = options_for(64);
  options.direct = false;
  PagePool pool(options);
  const StoreId store = pool.add_store(folder.write("a", 13, 64, kPage));
  CHECK(!pool.direct_io(store));
  const std::vector<PageNumber> pages = numbers(0, 64);
  fetch_and_compare(pool, store, 13, {1, 3, 5});
  CHECK_EQ(pool.load(store, pages.data(), 64, {}).pages_loaded, 61u);
  pool.check();
}

// Memory of this process that is the system's own: VmRSS without mapped files.
std::size_t resident_now() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return 0;
  unsigned long whole = 0, resident = 0, shared = 0;
  const int found = std::fscanf(file, "%lu %lu %lu", &whole, &resident, &shared);
  std::fclose(file);
  return found == 3 ? (resident - shared) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) : 0;
}

// A segment of four million pages opens as fast as one of four, and answers before its tables fill.
void test_tables_take_memory_as_pages_come() {
  constexpr std::uint32_t kMany = 1u << 22;
  constexpr std::size_t kMost = 4u << 20;
  TestFolder folder;
  StoreSpec spec = folder.write("a", 17, 100, kPage);
  CHECK(::truncate(spec.path.c_str(), static_cast<off_t>(std::uint64_t{kMany} * kPage)) == 0);
  spec.page_count = kMany;
  spec = TestFolder::with_table(std::move(spec), kPage);   // too short: no page is ever whole
  PoolOptions options = options_for(kMany);
  const std::size_t before = resident_now();
  PagePool pool(options);
  (void)pool.add_store(std::move(spec));
  const StoreId small = pool.add_store(folder.write("b", 18, 100, kPage));
  const std::size_t made = resident_now();
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK(made < before + kMost);   // the tables are 150 MiB in all
#else
  CHECK(made > 0 && before > 0 && kMost > 0);   // shadow memory is counted too
#endif
  fetch_and_compare(pool, small, 18, {0, 50, 99});
  CHECK_EQ(pool.stats().resident_bytes, 3 * kPage);
  pool.set_budget(64 * kPage);
  fetch_and_compare(pool, small, 18, numbers(0, 100));
  CHECK_EQ(pool.stats().resident_bytes, 64 * kPage);
  pool.check();
}

}  // namespace

int main() {
  RUN(test_fetch_reads_once_and_hits_after);
  RUN(test_polls_bring_all_of_a_large_fetch);
  RUN(test_overflow_comes_in_private_buffers);
  RUN(test_eviction_keeps_the_budget);
  RUN(test_a_guard_keeps_frames_from_reuse);
  RUN(test_load_merges_and_sticks);
  RUN(test_prefetch_accounting);
  RUN(test_budget_moves);
  RUN(test_stores_come_and_go);
  RUN(test_damage_is_quarantined);
  RUN(test_a_table_is_read_when_it_is_needed);
  RUN(test_a_table_comes_while_the_first_pages_do);
  RUN(test_a_table_is_that_of_the_file_that_was_opened);
  RUN(test_a_miss_brings_its_cluster_while_there_is_room);
  RUN(test_a_miss_with_a_near_deadline_brings_a_small_cluster);
  RUN(test_small_pages_and_wrong_input);
  RUN(test_without_direct_io);
  RUN(test_tables_take_memory_as_pages_come);
  return 0;
}
