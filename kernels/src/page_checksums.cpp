#include "page_checksums.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "page_pool_impl.hpp"
#include "stoker/crc32c.hpp"

namespace stoker {
namespace {

// O_DIRECT wants whole sectors, in the file as in memory.
constexpr std::size_t kSectorBytes = 4096;

// Fills `bytes`, whole sectors, from the file's offset until `length` of them are there.
bool read_sectors(PageFile& file, std::uint64_t offset, std::byte* bytes, std::size_t sectors_bytes,
                  std::size_t length) {
  std::size_t done = 0;
  while (done < length) {
    const std::size_t from = done / kSectorBytes * kSectorBytes;
    const bool direct = file.direct();
    const ssize_t got = ::pread(file.fd(), bytes + from, sectors_bytes - from,
                                static_cast<off_t>(offset + from));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && direct) {
      file.leave_direct();
      continue;
    }
    if (got < 0 || from + static_cast<std::size_t>(got) <= done) return false;
    done = from + static_cast<std::size_t>(got);
  }
  return true;
}

}  // namespace

PageChecksums::PageChecksums(StoreSpec& spec)
    : offset_bytes_(spec.table_offset_bytes), count_(spec.page_count), table_crc_(spec.table_crc),
      settled_(spec.table_offset_bytes == 0), table_(std::move(spec.checksums)) {}

bool PageChecksums::match(PageFile& file, PageNumber page, std::uint32_t crc) {
  settle(file);
  return page < table_.size() && table_[page] == crc;
}

void PageChecksums::prepare(PageFile& file) noexcept {
  try {
    settle(file);
  } catch (const std::bad_alloc&) {
  }
}

void PageChecksums::settle(PageFile& file) {
  if (is_settled()) return;
  // No std::call_once: not every one of them lets go when what it calls throws.
  const std::lock_guard<std::mutex> lock(mutex_);
  if (settled_.load(std::memory_order_relaxed)) return;
  read(file);
  settled_.store(true, std::memory_order_release);
}

void PageChecksums::read(PageFile& file) {
  const std::size_t length = std::size_t{count_} * sizeof(std::uint32_t);
  const std::size_t whole = (length + kSectorBytes - 1) / kSectorBytes * kSectorBytes;
  const PageBuffer buffer(std::max(whole, kSectorBytes));
  if (!read_sectors(file, offset_bytes_, buffer.data, whole, length)) return;
  if (crc32c(buffer.data, length) != table_crc_) return;
  std::vector<std::uint32_t> table(count_);
  if (length > 0) std::memcpy(table.data(), buffer.data, length);
  table_ = std::move(table);
}

}  // namespace stoker
