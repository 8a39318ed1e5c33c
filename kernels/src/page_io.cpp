#include "stoker/page_io.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "page_io_queue.hpp"
#include "stoker/errors.hpp"

namespace stoker {
namespace {

// Rings that wait for their next caller. More exist only while more callers read at once.
constexpr std::size_t kIdleQueuesMax = 32;
// Repeats of one read for EINTR, EAGAIN and short counts before it is called an error.
constexpr unsigned kRepeatsMax = 64;
// O_DIRECT continues a short read at a sector.
constexpr std::size_t kSectorBytes = 512;

std::atomic<ReadFaults*> faults_installed{nullptr};

std::string errno_text(int code) { return std::strerror(code); }

}  // namespace

ReadFaults* read_faults() noexcept { return faults_installed.load(std::memory_order_acquire); }

void set_read_faults(ReadFaults* faults) noexcept {
  faults_installed.store(faults, std::memory_order_release);
}

// ---- PageFile ----------------------------------------------------------------------------------

PageFile::PageFile(std::string path, bool direct) : path_(std::move(path)) {
  if (direct) {
    fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    direct_ = fd_ >= 0;
  }
  // Any refusal of O_DIRECT is asked again without: a real reason then speaks for itself.
  if (fd_ < 0) fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) throw StoreError(path_ + ": cannot be opened: " + errno_text(errno));
  struct stat facts {};
  if (::fstat(fd_, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    const std::string reason = S_ISREG(facts.st_mode) ? errno_text(errno) : "not a regular file";
    ::close(fd_);
    throw StoreError(path_ + ": cannot be read as pages: " + reason);
  }
  size_bytes_ = static_cast<std::uint64_t>(facts.st_size);
  device_ = facts.st_dev;
  // Buffered reads fetch what was asked and no more: read-ahead would be a second, blind prefetch.
  if (!direct_) ::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
}

PageFile::~PageFile() {
  if (fd_ >= 0) ::close(fd_);
}

void PageFile::leave_direct() noexcept {
  if (!direct_.exchange(false)) return;
  const int flags = ::fcntl(fd_, F_GETFL);
  if (flags >= 0) ::fcntl(fd_, F_SETFL, flags & ~O_DIRECT);
  ::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
}

// ---- results -----------------------------------------------------------------------------------

bool settle_again(ReadRequest& request, std::int64_t result) noexcept {
  if (ReadFaults* faults = read_faults()) result = faults->result(request, result);
  const auto fail = [&request](int code) {
    request.error = code;
    return false;
  };
  if (result < 0) {
    const int code = static_cast<int>(-result);
    // ECANCELED and EFAULT are what a ring answers when the thread that submitted the read has
    // ended before the kernel began it.
    const bool passing =
        code == EINTR || code == EAGAIN || code == ECANCELED || code == EFAULT;
    const bool refused_direct = code == EINVAL && request.issued_direct;
    if (!passing && !refused_direct) return fail(code);
    if (refused_direct) request.file->leave_direct();
    return ++request.repeats <= kRepeatsMax ? true : fail(code);
  }
  if (result == 0) return fail(ENODATA);   // the file ends before its pages do
  request.done_bytes += static_cast<std::size_t>(result);
  if (request.done_bytes >= request.length_bytes) {
    request.error = 0;
    return false;
  }
  if (++request.repeats > kRepeatsMax) return fail(EIO);
  request.done_bytes -= request.done_bytes % kSectorBytes;
  try {
    request.rest.reserve(request.parts.size());
  } catch (const std::bad_alloc&) {
    return fail(ENOMEM);   // whoever settles, a ring or a worker's thread, has nobody to tell
  }
  request.rest.clear();
  std::size_t skip = request.done_bytes;
  for (const iovec& part : request.parts) {
    if (skip >= part.iov_len) {
      skip -= part.iov_len;
      continue;
    }
    request.rest.push_back({static_cast<char*>(part.iov_base) + skip, part.iov_len - skip});
    skip = 0;
  }
  return true;
}

// ---- IoEngine ----------------------------------------------------------------------------------

IoEngine::IoEngine(IoBackend backend, unsigned threads)
    : workers_(std::make_shared<ReadWorkers>(threads == 0 ? 1 : threads)) {
  if (backend == IoBackend::threads) return;
  std::unique_ptr<ReadQueue> first = make_uring_queue();
  uring_ = first != nullptr;
  if (uring_) {
    idle_.reserve(kIdleQueuesMax);   // give_back() then cannot fail
    idle_.push_back(std::move(first));
  } else if (backend == IoBackend::io_uring) {
    throw StoreError("io_uring was asked for, and the kernel has it not or forbids it");
  }
}

IoEngine::~IoEngine() = default;

std::unique_ptr<ReadQueue> IoEngine::take_queue() {
  if (uring_) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<ReadQueue> queue = std::move(idle_.back());
        idle_.pop_back();
        return queue;
      }
    }
    if (std::unique_ptr<ReadQueue> queue = make_uring_queue()) return queue;
  }
  return make_threads_queue(workers_);
}

void IoEngine::give_back(std::unique_ptr<ReadQueue> queue) noexcept {
  if (!uring_ || !queue || !queue->reusable()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (idle_.size() < kIdleQueuesMax) idle_.push_back(std::move(queue));
}

const char* IoEngine::name() const noexcept { return uring_ ? "io_uring" : "threads"; }

}  // namespace stoker
