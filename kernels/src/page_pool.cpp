// The pool's stores, its budget and its facts.
#include "stoker/page_pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "page_pool_impl.hpp"
#include "stoker/errors.hpp"

namespace stoker {
namespace {

constexpr std::uint32_t kFramesMin = 16;
constexpr std::size_t kHugePage = 2u << 20;
constexpr std::size_t kSmallFirst = 8 * kHugePage;

const PoolOptions& checked(const PoolOptions& options) {
  if (options.page_bytes == 0 || options.page_bytes % 512 != 0) {
    throw BadInput("page_bytes must be a positive multiple of 512, not " +
                   std::to_string(options.page_bytes));
  }
  const std::size_t frames = options.budget_bytes / options.page_bytes;
  if (frames < kFramesMin || frames >= UINT32_MAX) {
    throw BadInput("budget_bytes " + std::to_string(options.budget_bytes) + " makes " +
                   std::to_string(frames) + " frames of " + std::to_string(options.page_bytes) +
                   " bytes; at least " + std::to_string(kFramesMin) + " are needed");
  }
  return options;
}

}  // namespace

Store::Store(StoreId store_id, StoreSpec&& store_spec, const PoolOptions& options)
    : id(store_id), checksums(store_spec), spec(std::move(store_spec)),
      file(spec.path, options.direct),
      limit(options.volume.any() ? ReadLimit::of_device(file.device(), options.volume) : nullptr),
      table(spec.page_count), quarantined(spec.page_count, false),
      failed_probation(spec.page_count) {
  stats.pages = spec.page_count;
}

PagePool::Impl::Impl(const PoolOptions& given)
    : options(checked(given)), io(options.backend, options.io_threads),
      frame_count(static_cast<std::uint32_t>(options.budget_bytes / options.page_bytes)),
      frames(std::size_t{frame_count} + 1), clock(std::size_t{frame_count} + 1),
      capacity(frame_count), free_frames(frame_count), limbo(frame_count),
      limbo_pinned(frame_count) {
  // More than needed, so that the first frame can begin at a huge page's border.
  const std::size_t bytes = static_cast<std::size_t>(frame_count) * options.page_bytes;
  slab_mapped_bytes = bytes + kHugePage + options.page_bytes;
  slab_mapping = ::mmap(nullptr, slab_mapped_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (slab_mapping == MAP_FAILED) {
    throw StoreError("no address space for " + std::to_string(bytes) +
                     " bytes of frames: " + std::strerror(errno));
  }
  const auto base = reinterpret_cast<std::uintptr_t>(slab_mapping);
  const std::uintptr_t first = (base + options.page_bytes + kHugePage - 1) / kHugePage * kHugePage;
  slab = static_cast<std::byte*>(slab_mapping) + (first - base - options.page_bytes);
  // The first frames come in small pages, and are left to the system to join once they are full: a
  // first answer that reads a hundred pages would wait for whole huge pages to be cleared.
  small_bytes = std::min(bytes, kSmallFirst);
  ::madvise(frame_bytes(1) + small_bytes, bytes - small_bytes, MADV_HUGEPAGE);
}

PagePool::Impl::~Impl() {
  {
    const std::lock_guard<std::mutex> lock(orphan_mutex);
    stopping = true;
  }
  orphan_ready.notify_all();
  if (orphan_thread.joinable()) orphan_thread.join();
  for (auto& slot : store_chunks) {
    StoreChunk* chunk = slot.load(std::memory_order_relaxed);
    if (chunk == nullptr) continue;
    for (auto& store : chunk->stores) delete store.load(std::memory_order_relaxed);
    delete chunk;
  }
  ::munmap(slab_mapping, slab_mapped_bytes);
}

Store* PagePool::Impl::store_or_null(StoreId id) const noexcept {
  if (id >= kChunk * kChunks) return nullptr;
  const StoreChunk* chunk = store_chunks[id / kChunk].load(std::memory_order_acquire);
  return chunk == nullptr ? nullptr : chunk->stores[id % kChunk].load(std::memory_order_acquire);
}

Store& PagePool::Impl::store_at(StoreId id) const {
  Store* store = store_or_null(id);
  if (store == nullptr || store->removing) {
    throw BadInput("store " + std::to_string(id) + " is not in the pool");
  }
  return *store;
}

void PagePool::Impl::require_rising(const Store& store, const PageNumber* pages,
                                    std::size_t count) const {
  for (std::size_t i = 0; i < count; ++i) {
    if (pages[i] < store.spec.page_count && (i == 0 || pages[i] > pages[i - 1])) continue;
    throw BadInput(store.spec.path + ": page numbers must rise and stay below " +
                   std::to_string(store.spec.page_count) + "; number " + std::to_string(i) +
                   " is " + std::to_string(pages[i]));
  }
}

PagePool::PagePool(const PoolOptions& options) : impl_(std::make_unique<Impl>(options)) {}
PagePool::~PagePool() = default;

// ---- stores ------------------------------------------------------------------------------------

StoreId PagePool::add_store(StoreSpec spec) {
  const std::size_t page_bytes = impl_->options.page_bytes;
  if (spec.table_offset_bytes == 0 && spec.checksums.size() != spec.page_count) {
    throw BadInput(spec.path + ": " + std::to_string(spec.page_count) + " pages need as many " +
                   "checksums, not " + std::to_string(spec.checksums.size()));
  }
  if (spec.offset_bytes % 4096 != 0) {
    throw BadInput(spec.path + ": offset " + std::to_string(spec.offset_bytes) +
                   " is not a multiple of 4096");
  }
  auto store = std::make_unique<Store>(0, std::move(spec), impl_->options);
  const std::uint64_t end = store->spec.offset_bytes +
                            static_cast<std::uint64_t>(store->spec.page_count) * page_bytes;
  if (store->file.size_bytes() < end) {
    throw StoreError(store->spec.path + ": " + std::to_string(store->spec.page_count) +
                     " pages end at byte " + std::to_string(end) + ", the file at byte " +
                     std::to_string(store->file.size_bytes()));
  }
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  const StoreId id = impl_->store_count;
  if (id >= Impl::kChunk * Impl::kChunks) throw StoreError("the pool has had too many stores");
  store->id = id;
  auto& chunk = impl_->store_chunks[id / Impl::kChunk];
  if (chunk.load(std::memory_order_relaxed) == nullptr) {
    chunk.store(new Impl::StoreChunk, std::memory_order_release);
  }
  chunk.load(std::memory_order_relaxed)
      ->stores[id % Impl::kChunk]
      .store(store.release(), std::memory_order_release);
  ++impl_->store_count;
  return id;
}

void PagePool::remove_store(StoreId id) {
  Impl& pool = *impl_;
  std::unique_ptr<Store> gone;   // closes its file after the mutex is let go
  {
    std::unique_lock<std::mutex> lock(pool.mutex);
    gone.reset(&pool.store_at(id));
    gone->removing = true;
    pool.store_idle.wait(lock, [&] { return gone->pending_count == 0 && gone->use_count == 0; });
  }
  in_stretches(pool.mutex, gone->spec.page_count, [&](std::size_t page) {
    const std::uint32_t frame = gone->table[page].load(std::memory_order_relaxed);
    if (frame != kAbsent) pool.evict_frame(frame);
  });
  const std::lock_guard<std::mutex> lock(pool.mutex);
  pool.reclaim();
  pool.store_chunks[id / Impl::kChunk]
      .load(std::memory_order_relaxed)
      ->stores[id % Impl::kChunk]
      .store(nullptr, std::memory_order_release);
}

PagePool::View PagePool::view(StoreId id) const noexcept {
  View view;
  const Store* store = impl_->store_or_null(id);
  if (store == nullptr) return view;
  view.table = store->table.data();
  view.clock = impl_->clock.data();
  view.slab = impl_->slab;
  view.page_bytes = impl_->options.page_bytes;
  view.page_count = store->spec.page_count;
  return view;
}

// ---- what may go -------------------------------------------------------------------------------

static Store& begin_use(PagePool::Impl& pool, StoreId id) {
  const std::lock_guard<std::mutex> lock(pool.mutex);
  Store& store = pool.store_at(id);
  ++store.use_count;
  return store;
}

StoreUse::StoreUse(PagePool::Impl& owner, StoreId id) : pool(owner), store(begin_use(owner, id)) {}

StoreUse::~StoreUse() {
  const std::lock_guard<std::mutex> lock(pool.mutex);
  --store.use_count;
  if (store.removing) pool.store_idle.notify_all();
}

void PagePool::unstick(StoreId id, const PageNumber* pages, std::size_t count) {
  const StoreUse use(*impl_, id);
  in_stretches(impl_->mutex, count, [&](std::size_t i) {
    if (pages[i] >= use.store.spec.page_count) return;
    const std::uint32_t frame = use.store.table[pages[i]].load(std::memory_order_relaxed);
    if (frame != kAbsent) impl_->set_sticky(frame, false);
  });
}

std::uint64_t PagePool::evict(StoreId id, const PageNumber* pages, std::size_t count) {
  const StoreUse use(*impl_, id);
  std::uint64_t evicted = 0;
  in_stretches(impl_->mutex, count, [&](std::size_t i) {
    if (pages[i] >= use.store.spec.page_count) return;
    const std::uint32_t frame = use.store.table[pages[i]].load(std::memory_order_relaxed);
    if (frame == kAbsent || impl_->frames[frame].sticky) return;
    if (impl_->frames[frame].pins.load(std::memory_order_acquire) > 0) return;
    impl_->evict_frame(frame);
    ++evicted;
  });
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->reclaim();
  return evicted;
}

void PagePool::Impl::set_capacity(std::uint32_t wanted) {
  std::uint32_t held = reading_count;
  for (std::uint32_t frame = 1; frame <= frames_begun; ++frame) {
    const Frame& entry = frames[frame];
    if (entry.state != FrameState::resident) continue;
    if (entry.sticky || entry.pins.load(std::memory_order_acquire) > 0) ++held;
  }
  if (held > wanted) {
    throw StoreError("a budget of " + std::to_string(wanted) + " frames cannot hold the " +
                     std::to_string(held) + " that are sticky, pinned or being read");
  }
  const bool shrinks = wanted < capacity;
  capacity = wanted;
  // Each call looks at a stretch of the rings, and what is not held is somewhere on them.
  while (resident_count + reading_count > capacity) (void)evict_one(0);
  reclaim();
  if (shrinks) give_memory_back();
}

void PagePool::set_budget(std::size_t budget_bytes) {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  const std::size_t wanted = budget_bytes / impl_->options.page_bytes;
  if (wanted < kFramesMin) {
    throw BadInput("budget " + std::to_string(budget_bytes) + " makes fewer than " +
                   std::to_string(kFramesMin) + " frames");
  }
  impl_->set_capacity(wanted < impl_->frame_count ? static_cast<std::uint32_t>(wanted)
                                                  : impl_->frame_count);
}

// ---- facts -------------------------------------------------------------------------------------

PoolStats PagePool::stats() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  PoolStats facts = impl_->totals;
  facts.page_bytes = impl_->options.page_bytes;
  facts.budget_bytes = impl_->capacity * impl_->options.page_bytes;
  facts.resident_bytes = impl_->resident_count * impl_->options.page_bytes;
  facts.demand_reads = impl_->demand_reads.load(std::memory_order_relaxed);
  facts.demand_bytes = impl_->demand_bytes.load(std::memory_order_relaxed);
  facts.demand_wait_us = impl_->demand_wait_us.load(std::memory_order_relaxed);
  facts.prefetch_reads = impl_->prefetch_reads.load(std::memory_order_relaxed);
  facts.prefetch_bytes = impl_->prefetch_bytes.load(std::memory_order_relaxed);
  return facts;
}

StoreStats PagePool::store_stats(StoreId id) const {
  const StoreUse use(*impl_, id);
  // Readers only mark the clock; what they have used of the prefetched pages is noted here.
  in_stretches(impl_->mutex, use.store.spec.page_count, [&](std::size_t page) {
    const std::uint32_t frame = use.store.table[page].load(std::memory_order_relaxed);
    if (frame == kAbsent || !impl_->frames[frame].prefetched) return;
    if ((impl_->clock[frame].load(std::memory_order_relaxed) & kTouchedBit) != 0) {
      impl_->note_use(impl_->frames[frame]);
    }
  });
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return use.store.stats;
}

std::vector<std::uint8_t> PagePool::residency(StoreId id) const {
  const StoreUse use(*impl_, id);
  std::vector<std::uint8_t> states(use.store.spec.page_count, 0);
  in_stretches(impl_->mutex, states.size(), [&](std::size_t page) {
    const std::uint32_t frame = use.store.table[page].load(std::memory_order_relaxed);
    if (frame != kAbsent) {
      states[page] = impl_->frames[frame].sticky ? 2 : 1;
    } else if (use.store.quarantined[page]) {
      states[page] = 3;
    }
  });
  return states;
}

std::size_t PagePool::demand_frames() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  const std::size_t sticky =
      impl_->resident_count - impl_->probation.size - impl_->proven.size;
  return impl_->capacity > sticky ? impl_->capacity - sticky : 0;
}

bool PagePool::is_roomy() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->leaves_idle(0);
}

const char* PagePool::backend_name() const noexcept { return impl_->io.name(); }

bool PagePool::direct_io(StoreId id) const {
  const StoreUse use(*impl_, id);
  return use.store.file.direct();
}

}  // namespace stoker
