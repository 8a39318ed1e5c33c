// Reads of pages from files: io_uring by raw system calls where the kernel has it, a pool of
// threads where not; O_DIRECT where the file system has it.
//
// Invariants
//   * A request that was submitted is handed back by wait() exactly once, with all its bytes or
//     with an errno. Until then the device may write into its buffers: they must stay alive.
//   * Short reads, EINTR and EAGAIN never reach the caller; EINVAL under O_DIRECT turns the file
//     to buffered reads and is repeated.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace stoker {

enum class IoBackend { automatic, io_uring, threads };

using Clock = std::chrono::steady_clock;
using Deadline = std::optional<Clock::time_point>;

// A file open for reading. Thread-safe.
class PageFile {
 public:
  // Throws StoreError when the file cannot be opened or is not a regular file.
  PageFile(std::string path, bool direct);
  ~PageFile();
  PageFile(const PageFile&) = delete;
  PageFile& operator=(const PageFile&) = delete;

  int fd() const noexcept { return fd_; }
  bool direct() const noexcept { return direct_.load(std::memory_order_relaxed); }
  // Turns O_DIRECT off for the reads to come: the device refused one of ours.
  void leave_direct() noexcept;
  std::uint64_t size_bytes() const noexcept { return size_bytes_; }
  dev_t device() const noexcept { return device_; }
  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
  int fd_ = -1;
  std::atomic<bool> direct_{false};
  std::uint64_t size_bytes_ = 0;
  dev_t device_ = 0;
};

// One contiguous region of a file, read into scattered buffers.
struct ReadRequest {
  PageFile* file = nullptr;
  std::uint64_t offset_bytes = 0;
  std::size_t length_bytes = 0;      // the sum of the parts
  std::vector<iovec> parts;          // at most 1024
  bool prefetch = false;             // goes behind demand where a queue has a say

  int error = 0;                     // the result: 0 when every byte is there, else an errno

  // Kept by the queue.
  std::size_t done_bytes = 0;
  std::vector<iovec> rest;           // what a short read left, empty before the first
  unsigned repeats = 0;
  bool issued_direct = false;
  ReadRequest* next = nullptr;
};

// A caller's own line to the device. Used by one thread at a time; it may change hands.
class ReadQueue {
 public:
  virtual ~ReadQueue() = default;   // waits for what is outstanding
  // Queues a request; it reaches the device with the next flush() or wait().
  virtual void submit(ReadRequest& request) = 0;
  virtual void flush() = 0;
  // The next request that ended; nullptr when nothing is outstanding or `until` came first. A
  // moment that has passed makes this a poll; an empty one waits without bound. `all` says that
  // the caller has no use for one before the others, which saves it a wake-up for each.
  virtual ReadRequest* wait(const Deadline& until, bool all) = 0;
  // Whether wait() has one at hand. Makes no system call, so that it can be asked all the time.
  virtual bool ready() noexcept = 0;
  virtual std::size_t outstanding() const noexcept = 0;
  // Whether it is worth keeping for the next caller.
  virtual bool reusable() const noexcept { return false; }
};

class ReadWorkers;

class IoEngine {
 public:
  // Throws StoreError when io_uring is asked for and the kernel refuses it.
  IoEngine(IoBackend backend, unsigned threads);
  ~IoEngine();
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // A queue with nothing outstanding. Never blocks. Rings are kept for the next caller; when the
  // kernel grants no more of them, the queue is one of the thread pool.
  std::unique_ptr<ReadQueue> take_queue();
  void give_back(std::unique_ptr<ReadQueue> queue) noexcept;
  const char* name() const noexcept;

 private:
  bool uring_ = false;
  std::mutex mutex_;
  std::vector<std::unique_ptr<ReadQueue>> idle_;   // rings, at most kIdleQueuesMax
  std::shared_ptr<ReadWorkers> workers_;
};

// Faults for tests: set before the first read, unset after the last one. Production pays one load
// of a null pointer for each read.
class ReadFaults {
 public:
  virtual ~ReadFaults() = default;
  // How long the device shall sit on this read before it begins.
  virtual std::chrono::microseconds delay(const ReadRequest&) noexcept {
    return std::chrono::microseconds{0};
  }
  // Sees each raw result (a byte count or -errno); returns what shall be seen in its place, and
  // may change the bytes that were read.
  virtual std::int64_t result(const ReadRequest&, std::int64_t outcome) noexcept {
    return outcome;
  }
};
void set_read_faults(ReadFaults* faults) noexcept;

}  // namespace stoker
