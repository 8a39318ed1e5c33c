// Read queues: both kinds, whole and damaged results, deadlines, changes of hands.
#include "stoker/page_io.hpp"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstddef>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "check.hpp"
#include "page_files.hpp"
#include "stoker/errors.hpp"

using namespace stoker;
using stoker::testing::kBackends;
using stoker::testing::page_matches;
using stoker::testing::TestFolder;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::uint64_t kSalt = 77;

struct Faults : ReadFaults {
  explicit Faults(std::uint64_t seed) : random(seed) { set_read_faults(this); }
  ~Faults() override { set_read_faults(nullptr); }

  std::chrono::microseconds delay(const ReadRequest&) noexcept override { return hold; }

  std::int64_t result(const ReadRequest&, std::int64_t outcome) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex);
    ++seen;
    const std::uint64_t dice = random() % 100;
    if (dice < fail_percent) return -fail_code;
    if (dice < fail_percent + short_percent && outcome > 1) {
      return 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(outcome));
    }
    return outcome;
  }

  std::mutex mutex;
  std::mt19937_64 random;
  std::chrono::microseconds hold{0};
  unsigned fail_percent = 0;
  unsigned short_percent = 0;
  int fail_code = EIO;
  std::uint64_t seen = 0;
};

// Pages read one by one, or in runs, into buffers of their own.
struct Reads {
  explicit Reads(PageFile& target) : file(target) {}

  void add(ReadQueue& queue, std::uint32_t first, std::uint32_t pages, bool prefetch = false) {
    auto request = std::make_unique<ReadRequest>();
    request->file = &file;
    request->offset_bytes = std::uint64_t{first} * kPage;
    request->length_bytes = pages * kPage;
    request->prefetch = prefetch;
    for (std::uint32_t page = 0; page < pages; ++page) {
      buffers.push_back(std::make_unique<Aligned>());
      numbers.push_back(first + page);
      request->parts.push_back({buffers.back()->bytes, kPage});
    }
    queue.submit(*request);
    requests.push_back(std::move(request));
  }

  std::size_t wait_all(ReadQueue& queue) {
    std::size_t ended = 0;
    while (queue.wait({}, ended % 2 == 0) != nullptr) ++ended;
    return ended;
  }

  void compare() const {
    for (const auto& request : requests) CHECK_EQ(request->error, 0);
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      CHECK(page_matches(buffers[i]->bytes, kPage, kSalt, numbers[i]));
    }
  }

  struct alignas(4096) Aligned {
    std::byte bytes[kPage];
  };
  PageFile& file;
  std::vector<std::unique_ptr<ReadRequest>> requests;
  std::vector<std::unique_ptr<Aligned>> buffers;
  std::vector<std::uint32_t> numbers;
};

void with_each_backend(void (*body)(IoEngine&, PageFile&)) {
  TestFolder disk;
  TestFolder memory("/dev/shm");
  const StoreSpec on_disk = disk.write("pages", kSalt, 600, kPage);
  const StoreSpec in_memory = memory.write("pages", kSalt, 600, kPage);
  for (const IoBackend backend : kBackends) {
    for (const StoreSpec& spec : {on_disk, in_memory}) {
      for (const bool direct : {true, false}) {
        IoEngine engine(backend, 4);
        PageFile file(spec.path, direct);
        CHECK_EQ(file.size_bytes(), 600 * kPage);
        body(engine, file);
      }
    }
  }
}

void test_many_reads() {
  with_each_backend([](IoEngine& engine, PageFile& file) {
    auto queue = engine.take_queue();
    for (int round = 0; round < 2; ++round) {
      Reads reads(file);
      for (std::uint32_t page = 0; page < 600; ++page) reads.add(*queue, 599 - page, 1);
      for (std::uint32_t page = 0; page < 500; page += 50) reads.add(*queue, page, 60, true);
      CHECK_EQ(queue->outstanding(), 610u);
      CHECK_EQ(reads.wait_all(*queue), 610u);
      CHECK_EQ(queue->outstanding(), 0u);
      reads.compare();
    }
    engine.give_back(std::move(queue));
  });
}

void test_short_reads_and_interruptions() {
  for (const int code : {EINTR, EAGAIN, ECANCELED}) {
    static int fail_code;
    fail_code = code;
    with_each_backend([](IoEngine& engine, PageFile& file) {
      Faults faults(9);
      faults.fail_percent = 30;
      faults.short_percent = 30;
      faults.fail_code = fail_code;
      auto queue = engine.take_queue();
      Reads reads(file);
      for (std::uint32_t page = 0; page < 600; page += 6) reads.add(*queue, page, 6);
      CHECK_EQ(reads.wait_all(*queue), 100u);
      reads.compare();
      CHECK(faults.seen > 150);
      CHECK(queue->outstanding() == 0);
    });
  }
}

void test_errors_are_told_apart() {
  with_each_backend([](IoEngine& engine, PageFile& file) {
    auto queue = engine.take_queue();
    {
      Faults faults(3);
      faults.fail_percent = 100;
      Reads reads(file);
      for (std::uint32_t page = 0; page < 20; ++page) reads.add(*queue, page, 1);
      CHECK_EQ(reads.wait_all(*queue), 20u);
      for (const auto& request : reads.requests) CHECK_EQ(request->error, EIO);
      CHECK_EQ(faults.seen, 20u);
    }
    {
      Faults faults(4);
      faults.fail_percent = 100;
      faults.fail_code = EAGAIN;   // for ever: the repeats have a bound
      Reads reads(file);
      reads.add(*queue, 0, 1);
      CHECK_EQ(reads.wait_all(*queue), 1u);
      CHECK_EQ(reads.requests[0]->error, EAGAIN);
    }
    Reads beyond(file);
    beyond.add(*queue, 599, 2);
    CHECK_EQ(beyond.wait_all(*queue), 1u);
    CHECK_EQ(beyond.requests[0]->error, ENODATA);
    Reads after(file);
    after.add(*queue, 598, 2);
    CHECK_EQ(after.wait_all(*queue), 1u);
    after.compare();
  });
}

void test_refused_direct_reads_turn_buffered() {
  TestFolder disk;
  const StoreSpec spec = disk.write("pages", kSalt, 20, kPage);
  for (const IoBackend backend : kBackends) {
    IoEngine engine(backend, 4);
    PageFile file(spec.path, true);
    if (!file.direct()) return;   // a file system without it
    auto queue = engine.take_queue();
    // An address that no device takes: off by one byte.
    std::vector<std::byte> buffer(kPage + 1);
    ReadRequest request;
    request.file = &file;
    request.offset_bytes = 3 * kPage;
    request.length_bytes = kPage;
    request.parts.push_back({buffer.data() + 1, kPage});
    queue->submit(request);
    CHECK(queue->wait({}, false) == &request);
    CHECK_EQ(request.error, 0);
    CHECK(page_matches(buffer.data() + 1, kPage, kSalt, 3));
  }
}

void test_deadlines_leave_reads_outstanding() {
  with_each_backend([](IoEngine& engine, PageFile& file) {
    Faults faults(5);
    faults.hold = std::chrono::milliseconds(60);
    // A machine that stood still for as long as reads are held has shown nothing: once more.
    for (bool late = true; late;) {
      auto queue = engine.take_queue();
      Reads reads(file);
      const auto began = Clock::now();
      for (std::uint32_t page = 0; page < 4; ++page) reads.add(*queue, page, 1);
      const bool polled = queue->wait(began, false) != nullptr;
      const bool waited = queue->wait(began + std::chrono::milliseconds(2), true) != nullptr;
      const std::size_t outstanding = queue->outstanding();
      late = Clock::now() - began >= faults.hold;
      CHECK(late || (!polled && !waited && outstanding == 4));
      // The buffers are still untouched, and still the device's.
      CHECK_EQ(reads.wait_all(*queue), 4u - polled - waited);
      reads.compare();
    }
  });
}

void test_a_queue_changes_hands() {
  with_each_backend([](IoEngine& engine, PageFile& file) {
    Faults faults(6);
    faults.hold = std::chrono::milliseconds(5);
    std::unique_ptr<ReadQueue> queue = engine.take_queue();
    Reads reads(file);
    // The thread that submits is gone before its reads end.
    std::thread submitter([&] {
      for (std::uint32_t page = 0; page < 60; page += 3) reads.add(*queue, page, 3);
      queue->flush();
    });
    submitter.join();
    CHECK_EQ(reads.wait_all(*queue), 20u);
    reads.compare();
    {
      Reads left(file);
      auto second = engine.take_queue();
      left.add(*second, 7, 3);
      second->flush();
      second.reset();   // its end waits for the read
      left.compare();
    }
  });
}

#ifndef __SANITIZE_THREAD__
// Lets the kernel answer `call` with `code` from now on. False where that cannot be done.
bool forbid(int call, std::uint32_t code) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (code & SECCOMP_RET_DATA)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {4, program};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0) {
    return true;
  }
  std::printf("  skipped: no seccomp here\n");
  return false;
}

template <class Body>
void in_a_child(Body&& body) {
  std::fflush(stdout);
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    body();
    std::fflush(stdout);
    std::_Exit(0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
}

void test_a_kernel_without_io_uring() {
  const auto body = [] {
    CHECK_THROWS(IoEngine(IoBackend::io_uring, 4), StoreError, "io_uring");
    TestFolder disk;
    const StoreSpec spec = disk.write("pages", kSalt, 20, kPage);
    IoEngine engine(IoBackend::automatic, 4);
    CHECK_EQ(std::string(engine.name()), "threads");
    PageFile file(spec.path, true);
    auto queue = engine.take_queue();
    Reads reads(file);
    reads.add(*queue, 0, 20);
    CHECK_EQ(reads.wait_all(*queue), 1u);
    reads.compare();
  };
  for (const auto& [call, code] : {std::pair{__NR_io_uring_setup, ENOSYS},
                                   std::pair{__NR_io_uring_setup, EPERM},
                                   std::pair{__NR_io_uring_enter, EPERM}}) {
    in_a_child([&body, number = call, answer = static_cast<std::uint32_t>(code)] {
      if (forbid(number, answer)) body();
    });
  }
}

// The ring is forbidden while it is in use: what was not taken fails, nothing hangs.
void read_with_a_forbidden_ring() {
  TestFolder disk;
  const StoreSpec spec = disk.write("pages", kSalt, 200, kPage);
  IoEngine engine(IoBackend::automatic, 4);
  if (std::string(engine.name()) != "io_uring") return;
  PageFile file(spec.path, true);
  auto queue = engine.take_queue();
  if (!forbid(__NR_io_uring_enter, EPERM)) return;
  Reads reads(file);
  for (std::uint32_t page = 0; page < 200; ++page) reads.add(*queue, page, 1);
  CHECK_EQ(reads.wait_all(*queue), 200u);
  for (const auto& request : reads.requests) CHECK_EQ(request->error, EPERM);
  CHECK(!queue->reusable());
  engine.give_back(std::move(queue));
}

void test_io_uring_forbidden_under_way() { in_a_child(read_with_a_forbidden_ring); }

#endif  // __SANITIZE_THREAD__

void test_many_callers() {
  with_each_backend([](IoEngine& engine, PageFile& file) {
    std::vector<std::thread> threads;
    for (int caller = 0; caller < 12; ++caller) {
      threads.emplace_back([&engine, &file, caller] {
        std::mt19937_64 random(static_cast<std::uint64_t>(caller));
        for (int round = 0; round < 10; ++round) {
          auto queue = engine.take_queue();
          Reads reads(file);
          for (int i = 0; i < 8; ++i) {
            reads.add(*queue, static_cast<std::uint32_t>(random() % 597), 3, i % 2 == 0);
          }
          CHECK_EQ(reads.wait_all(*queue), 8u);
          reads.compare();
          engine.give_back(std::move(queue));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

}  // namespace

int main() {
  std::printf("backend: %s\n", IoEngine(kBackends[0], 1).name());
  RUN(test_many_reads);
  RUN(test_short_reads_and_interruptions);
  RUN(test_errors_are_told_apart);
  RUN(test_refused_direct_reads_turn_buffered);
  RUN(test_deadlines_leave_reads_outstanding);
  RUN(test_a_queue_changes_hands);
#ifndef __SANITIZE_THREAD__
  RUN(test_a_kernel_without_io_uring);
  RUN(test_io_uring_forbidden_under_way);
#endif
  RUN(test_many_callers);
  return 0;
}
