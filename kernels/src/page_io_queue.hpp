// What the two kinds of read queues share. Private to page_io*.cpp.
#pragma once

#include <condition_variable>
#include <deque>
#include <thread>

#include "stoker/page_io.hpp"

namespace stoker {

ReadFaults* read_faults() noexcept;

// The parts that are still to be filled.
inline const std::vector<iovec>& parts_left(const ReadRequest& request) noexcept {
  return request.rest.empty() ? request.parts : request.rest;
}

// Takes a raw result (bytes or -errno) into the request. True: issue it again, for what is left.
bool settle_again(ReadRequest& request, std::int64_t result) noexcept;

// Nullptr when the kernel has no io_uring, forbids it, or grants no further ring.
std::unique_ptr<ReadQueue> make_uring_queue();

// Threads that read with preadv; demand before prefetch. Started when first needed.
class ReadWorkers {
 public:
  explicit ReadWorkers(unsigned threads_max) : threads_max_(threads_max) {}
  ~ReadWorkers();
  ReadWorkers(const ReadWorkers&) = delete;
  ReadWorkers& operator=(const ReadWorkers&) = delete;

  class Queue;
  void enqueue(ReadRequest& request, Queue& from);

 private:
  struct Task {
    ReadRequest* request;
    Queue* from;
  };
  void work();

  const unsigned threads_max_;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Task> demand_;
  std::deque<Task> prefetch_;
  std::vector<std::thread> threads_;
  unsigned idle_ = 0;
  bool stopping_ = false;
};

std::unique_ptr<ReadQueue> make_threads_queue(std::shared_ptr<ReadWorkers> workers);

}  // namespace stoker
