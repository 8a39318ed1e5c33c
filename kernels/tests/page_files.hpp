// Files of pages with known contents, for the tests of page I/O and of the page pool.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"
#include "stoker/crc32c.hpp"
#include "stoker/page_pool.hpp"

namespace stoker::testing {

#ifdef __SANITIZE_THREAD__
// The kernel's writes by way of io_uring are invisible to the thread sanitizer.
inline constexpr IoBackend kBackends[] = {IoBackend::threads};
#else
inline constexpr IoBackend kBackends[] = {IoBackend::automatic, IoBackend::threads};
#endif

// Fills one page so that every word tells its page and its place.
inline void fill_page(std::byte* page, std::size_t page_bytes, std::uint64_t salt,
                      std::uint32_t number) {
  std::uint64_t state = salt * 0x9E3779B97F4A7C15ull + number * 0xBF58476D1CE4E5B9ull + 1;
  for (std::size_t at = 0; at < page_bytes; at += 8) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(page + at, &state, 8);
  }
}

inline bool page_matches(const std::byte* page, std::size_t page_bytes, std::uint64_t salt,
                         std::uint32_t number) {
  std::vector<std::byte> expected(page_bytes);
  fill_page(expected.data(), page_bytes, salt, number);
  return std::memcmp(page, expected.data(), page_bytes) == 0;
}

// A folder of its own, removed at the end. On the disk of $STOKER_TEST_DIR, else of /var/tmp.
class TestFolder {
 public:
  explicit TestFolder(const char* base = nullptr) {
    const char* chosen = base != nullptr ? base : std::getenv("STOKER_TEST_DIR");
    path_ = std::string(chosen != nullptr ? chosen : "/var/tmp") + "/stoker-pool-XXXXXX";
    CHECK(::mkdtemp(path_.data()) != nullptr);
  }
  ~TestFolder() {
    for (const std::string& file : files_) ::unlink(file.c_str());
    ::rmdir(path_.c_str());
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  // Writes offset_bytes of zeros and the pages, and drops them from the system's cache.
  StoreSpec write(const std::string& name, std::uint64_t salt, std::uint32_t page_count,
                  std::size_t page_bytes, std::uint64_t offset_bytes = 0) {
    StoreSpec spec;
    spec.path = path_ + "/" + name;
    spec.offset_bytes = offset_bytes;
    spec.page_count = page_count;
    files_.push_back(spec.path);
    const int fd = ::open(spec.path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    CHECK(fd >= 0);
    CHECK(::ftruncate(fd, static_cast<off_t>(offset_bytes)) == 0);
    std::vector<std::byte> page(page_bytes);
    CHECK(::lseek(fd, static_cast<off_t>(offset_bytes), SEEK_SET) >= 0);
    for (std::uint32_t number = 0; number < page_count; ++number) {
      fill_page(page.data(), page_bytes, salt, number);
      spec.checksums.push_back(crc32c(page.data(), page_bytes));
      CHECK(::write(fd, page.data(), page_bytes) == static_cast<ssize_t>(page_bytes));
    }
    CHECK(::fsync(fd) == 0);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
    return spec;
  }

  // The same file with its table of checksums behind the pages, to be read when it is needed.
  static StoreSpec with_table(StoreSpec spec, std::size_t page_bytes) {
    const std::size_t length = spec.checksums.size() * sizeof(std::uint32_t);
    spec.table_offset_bytes = spec.offset_bytes + std::uint64_t{spec.page_count} * page_bytes;
    spec.table_crc = crc32c(spec.checksums.data(), length);
    const int fd = ::open(spec.path.c_str(), O_WRONLY);
    CHECK(fd >= 0);
    CHECK(::pwrite(fd, spec.checksums.data(), length,
                   static_cast<off_t>(spec.table_offset_bytes)) == static_cast<ssize_t>(length));
    ::close(fd);
    spec.checksums.clear();
    return spec;
  }

  // Flips one bit of a page on the disk.
  static void damage(const StoreSpec& spec, std::size_t page_bytes, std::uint32_t number,
                     std::size_t bit = 12345) {
    const int fd = ::open(spec.path.c_str(), O_RDWR);
    CHECK(fd >= 0);
    const auto at = static_cast<off_t>(spec.offset_bytes + std::uint64_t{number} * page_bytes +
                                       bit / 8 % page_bytes);
    unsigned char byte = 0;
    CHECK(::pread(fd, &byte, 1, at) == 1);
    byte = static_cast<unsigned char>(byte ^ (1u << bit % 8));
    CHECK(::pwrite(fd, &byte, 1, at) == 1);
    CHECK(::fsync(fd) == 0);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::vector<std::string> files_;
};

}  // namespace stoker::testing
