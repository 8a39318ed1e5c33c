// What a store's pages must sum to.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "stoker/page_io.hpp"
#include "stoker/page_pool.hpp"

namespace stoker {

// The table of a store's checksums: given, or read from the file when first asked, since a large
// segment's tables take longer to read than its first answer. It is read through the descriptor
// that the pages are read through: the path may by then name nothing, or another file. A table
// that cannot be read, or is not the one that was promised, matches no page: they are then all
// damaged, and say so. Where memory for it runs out, match() throws, and the next call tries again.
class PageChecksums {
 public:
  explicit PageChecksums(StoreSpec& spec);   // takes the spec's own table
  bool match(PageFile& file, PageNumber page, std::uint32_t crc);
  bool is_settled() const noexcept { return settled_.load(std::memory_order_acquire); }
  // Reads the table now if nobody has, so that match() need not once the pages are there. Where
  // memory runs out, match() comes to it.
  void prepare(PageFile& file) noexcept;

 private:
  void settle(PageFile& file);
  void read(PageFile& file);

  std::uint64_t offset_bytes_;
  std::uint32_t count_;
  std::uint32_t table_crc_;
  std::mutex mutex_;                // of this table alone: who waits here waits for what it brings
  std::atomic<bool> settled_;       // the table is there, or never will be
  std::vector<std::uint32_t> table_;
};

}  // namespace stoker
