#include "page_checksums.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "stoker/crc32c.hpp"

namespace stoker {

PageChecksums::PageChecksums(StoreSpec& spec)
    : path_(spec.path), offset_bytes_(spec.table_offset_bytes), count_(spec.page_count),
      table_crc_(spec.table_crc), given_(spec.table_offset_bytes == 0),
      table_(std::move(spec.checksums)) {}

bool PageChecksums::match(PageNumber page, std::uint32_t crc) {
  if (!given_) std::call_once(once_, [this] { read(); });
  return page < table_.size() && table_[page] == crc;
}

void PageChecksums::read() {
  std::vector<std::uint32_t> table(count_);
  auto* bytes = reinterpret_cast<char*>(table.data());
  const std::size_t length = table.size() * sizeof(std::uint32_t);
  const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  std::size_t done = 0;
  while (done < length) {
    const ssize_t got = ::pread(file, bytes + done, length - done,
                                static_cast<off_t>(offset_bytes_ + done));
    if (got > 0) {
      done += static_cast<std::size_t>(got);
    } else if (got == 0 || errno != EINTR) {
      break;
    }
  }
  ::close(file);
  if (done != length || crc32c(bytes, length) != table_crc_) return;
  table_ = std::move(table);
}

}  // namespace stoker
