// The fallback of io_uring: threads that read with preadv.
#include <cerrno>
#include <utility>

#include "page_io_queue.hpp"

namespace stoker {
namespace {

void read_whole(ReadRequest& request) {
  if (ReadFaults* faults = read_faults()) {
    const auto delay = faults->delay(request);
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
  }
  for (;;) {
    const std::vector<iovec>& parts = parts_left(request);
    request.issued_direct = request.file->direct();
    const ssize_t got = ::preadv(request.file->fd(), parts.data(), static_cast<int>(parts.size()),
                                 static_cast<off_t>(request.offset_bytes + request.done_bytes));
    if (!settle_again(request, got < 0 ? -static_cast<std::int64_t>(errno) : got)) return;
  }
}

}  // namespace

class ReadWorkers::Queue final : public ReadQueue {
 public:
  explicit Queue(std::shared_ptr<ReadWorkers> workers) : workers_(std::move(workers)) {}

  ~Queue() override {
    while (outstanding_ > 0) (void)wait({}, true);
  }

  void submit(ReadRequest& request) override {
    ++outstanding_;
    try {
      workers_->enqueue(request, *this);
    } catch (...) {
      --outstanding_;
      throw;
    }
  }

  void flush() override {}

  ReadRequest* wait(const Deadline& until, bool) override {
    if (outstanding_ == 0) return nullptr;
    std::unique_lock<std::mutex> lock(mutex_);
    const auto any = [this] { return ended_head_ != nullptr; };
    if (!until) {
      ended_.wait(lock, any);
    } else if (!ended_.wait_until(lock, *until, any)) {
      return nullptr;
    }
    ReadRequest* request = ended_head_;
    ended_head_ = request->next;
    if (ended_head_ == nullptr) ended_tail_ = nullptr;
    --outstanding_;
    return request;
  }

  bool ready() noexcept override {
    if (outstanding_ == 0) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    return ended_head_ != nullptr;
  }

  std::size_t outstanding() const noexcept override { return outstanding_; }

  // Called by a worker. Notifies under the lock: once it is let go, the queue may be gone.
  void hand_back(ReadRequest& request) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    request.next = nullptr;
    if (ended_tail_ == nullptr) {
      ended_head_ = &request;
    } else {
      ended_tail_->next = &request;
    }
    ended_tail_ = &request;
    ended_.notify_one();
  }

 private:
  std::shared_ptr<ReadWorkers> workers_;
  std::size_t outstanding_ = 0;   // the owner's own count
  std::mutex mutex_;
  std::condition_variable ended_;
  ReadRequest* ended_head_ = nullptr;
  ReadRequest* ended_tail_ = nullptr;
};

ReadWorkers::~ReadWorkers() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  ready_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ReadWorkers::enqueue(ReadRequest& request, Queue& from) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::deque<Task>& line = request.prefetch ? prefetch_ : demand_;
  line.push_back({&request, &from});
  if (idle_ < demand_.size() + prefetch_.size() && threads_.size() < threads_max_) {
    try {
      threads_.emplace_back([this] { work(); });
    } catch (...) {
      // The threads that there are will do; without any, nobody would ever read this.
      if (threads_.empty()) {
        line.pop_back();
        throw;
      }
    }
  }
  ready_.notify_one();
}

void ReadWorkers::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    while (demand_.empty() && prefetch_.empty()) {
      if (stopping_) return;
      ++idle_;
      ready_.wait(lock);
      --idle_;
    }
    std::deque<Task>& line = demand_.empty() ? prefetch_ : demand_;
    const Task task = line.front();
    line.pop_front();
    lock.unlock();
    read_whole(*task.request);
    task.from->hand_back(*task.request);
    lock.lock();
  }
}

std::unique_ptr<ReadQueue> make_threads_queue(std::shared_ptr<ReadWorkers> workers) {
  return std::make_unique<ReadWorkers::Queue>(std::move(workers));
}

}  // namespace stoker
