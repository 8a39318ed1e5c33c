// io_uring by raw system calls: one small ring for each caller, so that demand reads of different
// threads never wait for each other's submissions.
#include "page_io_queue.hpp"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

// Headers older than 5.11 lack the wait with a timeout that deadlines need.
#ifndef IORING_ENTER_EXT_ARG

namespace stoker {
std::unique_ptr<ReadQueue> make_uring_queue() { return nullptr; }
}  // namespace stoker

#else

#include <linux/time_types.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace stoker {
namespace {

constexpr unsigned kDepth = 128;            // reads of one caller that the kernel holds at once
constexpr Clock::time_point kNever = Clock::time_point::max();
constexpr std::uint16_t kPrefetchPriority = (2u << 13) | 7u;   // best effort, lowest level

int sys_setup(unsigned entries, io_uring_params* params) noexcept {
  return static_cast<int>(::syscall(__NR_io_uring_setup, entries, params));
}

int sys_enter(int ring, unsigned submit, unsigned complete, unsigned flags, const void* argument,
              std::size_t argument_bytes) noexcept {
  return static_cast<int>(
      ::syscall(__NR_io_uring_enter, ring, submit, complete, flags, argument, argument_bytes));
}

// A mapping that goes with its owner.
class Mapping {
 public:
  Mapping() = default;
  ~Mapping() {
    if (base_ != nullptr) ::munmap(base_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  bool map(int ring, std::size_t bytes, std::int64_t offset) noexcept {
    void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                        static_cast<off_t>(offset));
    if (base == MAP_FAILED) return false;
    base_ = base;
    bytes_ = bytes;
    return true;
  }
  template <class T>
  T* at(std::size_t offset) const noexcept {
    return reinterpret_cast<T*>(static_cast<char*>(base_) + offset);
  }

 private:
  void* base_ = nullptr;
  std::size_t bytes_ = 0;
};

class UringQueue final : public ReadQueue {
 public:
  UringQueue() = default;

  ~UringQueue() override {
    while (outstanding_ > 0) (void)wait_until(kNever, true);
    if (ring_ >= 0) ::close(ring_);
  }

  // False when the kernel refuses any step; a no-op is sent through to see the ring work.
  bool open() noexcept {
    io_uring_params params{};
    ring_ = sys_setup(kDepth, &params);
    if (ring_ < 0) return false;
    constexpr unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG;
    if ((params.features & needed) != needed) return false;
    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(std::uint32_t);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    if (!rings_.map(ring_, std::max(sq_bytes, cq_bytes), IORING_OFF_SQ_RING)) return false;
    if (!entries_.map(ring_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) {
      return false;
    }
    sq_tail_ = rings_.at<std::uint32_t>(params.sq_off.tail);
    sq_mask_ = *rings_.at<std::uint32_t>(params.sq_off.ring_mask);
    sq_array_ = rings_.at<std::uint32_t>(params.sq_off.array);
    sqes_ = entries_.at<io_uring_sqe>(0);
    cq_head_ = rings_.at<std::uint32_t>(params.cq_off.head);
    cq_tail_ = rings_.at<std::uint32_t>(params.cq_off.tail);
    cq_mask_ = *rings_.at<std::uint32_t>(params.cq_off.ring_mask);
    cqes_ = rings_.at<io_uring_cqe>(params.cq_off.cqes);
    io_uring_sqe& probe = next_entry();
    probe.opcode = IORING_OP_NOP;
    return sys_enter(ring_, std::exchange(staged_, 0u), 1, IORING_ENTER_GETEVENTS, nullptr, 0) ==
               1 &&
           reap() == nullptr;
  }

  void submit(ReadRequest& request) override {
    push(request);
    ++outstanding_;
  }

  void flush() override {
    stage();
    if (staged_ > 0) enter(0, kNever);
  }

  ReadRequest* wait(const Deadline& until, bool all) override {
    return wait_until(until ? *until : kNever, all);
  }

  bool ready() noexcept override {
    return *cq_head_ != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE) ||
           (broken_ && backlog_head_ != nullptr);
  }

  std::size_t outstanding() const noexcept override { return outstanding_; }
  bool reusable() const noexcept override { return outstanding_ == 0 && !broken_; }

 private:
  ReadRequest* wait_until(Clock::time_point end, bool all) {
    for (;;) {
      if (ReadRequest* request = reap()) {
        --outstanding_;
        return request;
      }
      if (outstanding_ == 0) return nullptr;
      stage();
      const bool past = end != kNever && Clock::now() >= end;
      if (past) {
        // One look at the kernel's side: completions may need this thread to run them.
        enter(0, end);
        ReadRequest* request = reap();
        if (request != nullptr) --outstanding_;
        return request;
      }
      // With more behind than the ring holds, half of it is enough to go on with.
      const std::size_t most = backlog_head_ == nullptr ? in_kernel_ : in_kernel_ / 2;
      const unsigned complete = all ? std::max(1u, static_cast<unsigned>(most)) : 1u;
      enter(complete, end);
    }
  }

  void push(ReadRequest& request) noexcept {
    request.next = nullptr;
    if (backlog_tail_ == nullptr) {
      backlog_head_ = &request;
    } else {
      backlog_tail_->next = &request;
    }
    backlog_tail_ = &request;
  }

  ReadRequest* pop_backlog() noexcept {
    ReadRequest* request = backlog_head_;
    backlog_head_ = request->next;
    if (backlog_head_ == nullptr) backlog_tail_ = nullptr;
    return request;
  }

  io_uring_sqe& next_entry() noexcept {
    const std::uint32_t tail = *sq_tail_;   // only this side writes it
    const std::uint32_t index = tail & sq_mask_;
    io_uring_sqe& entry = sqes_[index];
    std::memset(&entry, 0, sizeof entry);
    sq_array_[index] = index;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++staged_;
    return entry;
  }

  // Moves the backlog into the ring as far as its depth goes.
  void stage() noexcept {
    while (backlog_head_ != nullptr && in_kernel_ < kDepth && staged_ + 2 <= kDepth && !broken_) {
      ReadRequest& request = *pop_backlog();
      if (ReadFaults* faults = read_faults()) stage_delay(faults->delay(request));
      const std::vector<iovec>& parts = parts_left(request);
      request.issued_direct = request.file->direct();
      io_uring_sqe& entry = next_entry();
      entry.opcode = IORING_OP_READV;
      entry.fd = request.file->fd();
      entry.off = request.offset_bytes + request.done_bytes;
      entry.addr = reinterpret_cast<std::uint64_t>(parts.data());
      entry.len = static_cast<std::uint32_t>(parts.size());
      if (request.prefetch) entry.ioprio = kPrefetchPriority;
      entry.user_data = reinterpret_cast<std::uint64_t>(&request);
      ++in_kernel_;
    }
  }

  // Tests only: a timer that the read is chained to, so that the kernel itself writes late.
  void stage_delay(std::chrono::microseconds delay) noexcept {
    if (delay.count() <= 0) return;
    const std::size_t slot = delays_used_++ % kDepth;
    delays_[slot].tv_sec = delay.count() / 1'000'000;
    delays_[slot].tv_nsec = delay.count() % 1'000'000 * 1000;
    io_uring_sqe& entry = next_entry();
    entry.opcode = IORING_OP_TIMEOUT;
    entry.fd = -1;
    entry.addr = reinterpret_cast<std::uint64_t>(&delays_[slot]);
    entry.len = 1;
    entry.flags = IOSQE_IO_HARDLINK;
  }

  // Submits what is staged and waits for `complete` completions or the deadline.
  void enter(unsigned complete, Clock::time_point until) noexcept {
    io_uring_getevents_arg argument{};
    __kernel_timespec timeout{};
    unsigned flags = IORING_ENTER_GETEVENTS;
    if (complete > 0 && until != kNever) {
      const auto left = std::max(Clock::duration::zero(), until - Clock::now());
      const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
      timeout.tv_sec = nanoseconds / 1'000'000'000;
      timeout.tv_nsec = nanoseconds % 1'000'000'000;
      argument.ts = reinterpret_cast<std::uint64_t>(&timeout);
      flags |= IORING_ENTER_EXT_ARG;
    }
    const bool timed = (flags & IORING_ENTER_EXT_ARG) != 0;
    const int taken = sys_enter(ring_, staged_, complete, flags, timed ? &argument : nullptr,
                                timed ? sizeof argument : 0);
    if (taken >= 0) {
      staged_ -= std::min(staged_, static_cast<unsigned>(taken));
      return;
    }
    const int code = errno;
    if (code == EINTR || code == ETIME) return;
    if (code == EAGAIN || code == EBUSY || code == ENOMEM) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      return;
    }
    give_up(code);
  }

  // The kernel takes no more submissions: what it has not taken ends with the errno; what it has
  // taken still completes.
  void give_up(int code) noexcept {
    if (broken_) std::this_thread::sleep_for(std::chrono::microseconds(50));
    broken_ = true;
    for (std::uint32_t tail = *sq_tail_; staged_ > 0; --staged_) {
      --tail;
      const io_uring_sqe& entry = sqes_[tail & sq_mask_];
      __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
      if (entry.opcode != IORING_OP_READV) continue;
      auto* request = reinterpret_cast<ReadRequest*>(entry.user_data);
      request->error = code;
      --in_kernel_;
      push(*request);
    }
    broken_errno_ = code;
  }

  ReadRequest* reap() noexcept {
    for (;;) {
      const std::uint32_t head = *cq_head_;   // only this side writes it
      if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) break;
      const io_uring_cqe& entry = cqes_[head & cq_mask_];
      auto* request = reinterpret_cast<ReadRequest*>(entry.user_data);
      const std::int64_t result = entry.res;
      __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
      if (request == nullptr) continue;   // the probe, or a test's timer
      --in_kernel_;
      if (!settle_again(*request, result)) return request;
      push(*request);
    }
    if (broken_ && backlog_head_ != nullptr) {
      ReadRequest* request = pop_backlog();
      request->error = broken_errno_;
      return request;
    }
    return nullptr;
  }

  int ring_ = -1;
  Mapping rings_;
  Mapping entries_;
  std::uint32_t* sq_tail_ = nullptr;
  std::uint32_t* sq_array_ = nullptr;
  std::uint32_t sq_mask_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  std::uint32_t* cq_head_ = nullptr;
  std::uint32_t* cq_tail_ = nullptr;
  std::uint32_t cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;

  unsigned staged_ = 0;            // entries in the ring that the kernel has not taken
  std::size_t in_kernel_ = 0;      // reads staged or taken, not yet reaped
  std::size_t outstanding_ = 0;    // submitted and not yet handed back
  ReadRequest* backlog_head_ = nullptr;
  ReadRequest* backlog_tail_ = nullptr;
  bool broken_ = false;
  int broken_errno_ = 0;
  __kernel_timespec delays_[kDepth] = {};
  std::size_t delays_used_ = 0;
};

}  // namespace

std::unique_ptr<ReadQueue> make_uring_queue() {
  auto queue = std::make_unique<UringQueue>();
  if (!queue->open()) return nullptr;
  return queue;
}

}  // namespace stoker

#endif  // IORING_ENTER_EXT_ARG
