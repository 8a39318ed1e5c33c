// Tables of which an open segment needs little at first. Private to the pool.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

namespace stoker {

// A fixed number of T, all bytes zero, which must be T's first value. The kernel gives memory to
// what is used, when it is used: a large table costs nothing to make, and little while few of its
// pages are touched.
template <class T>
class LazyTable {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  explicit LazyTable(std::size_t count) : bytes_(count == 0 ? 1 : count * sizeof(T)), size_(count) {
    void* base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    items_ = static_cast<T*>(base);
  }
  ~LazyTable() { ::munmap(items_, bytes_); }
  LazyTable(const LazyTable&) = delete;
  LazyTable& operator=(const LazyTable&) = delete;

  T& operator[](std::size_t i) noexcept { return items_[i]; }
  const T& operator[](std::size_t i) const noexcept { return items_[i]; }
  T* data() noexcept { return items_; }
  const T* data() const noexcept { return items_; }
  std::size_t size() const noexcept { return size_; }

 private:
  std::size_t bytes_;
  std::size_t size_;
  T* items_ = nullptr;
};

// A stack that never grows past what it was made for, so that pushing cannot fail.
class FrameStack {
 public:
  explicit FrameStack(std::size_t most) : items_(most) {}
  void push(std::uint32_t frame) noexcept { items_[size_++] = frame; }
  std::uint32_t pop() noexcept { return items_[--size_]; }
  bool empty() const noexcept { return size_ == 0; }
  std::size_t size() const noexcept { return size_; }
  void keep(std::size_t count) noexcept { size_ = count; }   // the oldest
  std::uint32_t operator[](std::size_t i) const noexcept { return items_[i]; }
  std::uint32_t* begin() noexcept { return items_.data(); }
  std::uint32_t* end() noexcept { return items_.data() + size_; }
  const std::uint32_t* begin() const noexcept { return items_.data(); }
  const std::uint32_t* end() const noexcept { return items_.data() + size_; }

 private:
  LazyTable<std::uint32_t> items_;
  std::size_t size_ = 0;
};

// A queue that never grows past what it was made for, so that pushing cannot fail. Empty, it begins
// at its table's start again: memory is used for as long as it ever was, not as often.
template <class T>
class FixedQueue {
 public:
  explicit FixedQueue(std::size_t most) : items_(most) {}
  void push(const T& item) noexcept { items_[(head_ + size_++) % items_.size()] = item; }
  const T& front() const noexcept { return items_[head_]; }
  void pop() noexcept {
    head_ = --size_ == 0 ? 0 : (head_ + 1) % items_.size();
  }
  bool empty() const noexcept { return size_ == 0; }
  std::size_t size() const noexcept { return size_; }
  const T& operator[](std::size_t i) const noexcept { return items_[(head_ + i) % items_.size()]; }

 private:
  LazyTable<T> items_;
  std::size_t head_ = 0;
  std::size_t size_ = 0;
};

}  // namespace stoker
