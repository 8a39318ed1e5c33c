// What the files of the Python module share: arrays in as views, arrays out as new ones.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <chrono>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <vector>

#include "stoker/page_io.hpp"

namespace stoker_python {

namespace nb = nanobind;

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// An array of the caller's to write to. Making one here costs a microsecond, in Python a fifth.
template <typename T>
using Output = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// One of any shape; `T` const to read it.
template <typename T>
using AnyShape = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
template <typename T>
using NumpyArray = nb::ndarray<nb::numpy, T>;

template <typename T>
struct Owned {
  std::unique_ptr<T[]> data;
  explicit Owned(std::size_t count) : data(new T[count]()) {}
  T* get() { return data.get(); }
  NumpyArray<T> to_numpy(std::initializer_list<std::size_t> shape) {
    T* raw = data.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return NumpyArray<T>(raw, shape, owner);
  }
};

template <typename T>
NumpyArray<T> copy_vector(const std::vector<T>& values) {
  Owned<T> out(values.size());
  if (!values.empty()) std::memcpy(out.get(), values.data(), values.size() * sizeof(T));
  return out.to_numpy({values.size()});
}

inline stoker::Deadline deadline_in(std::optional<double> seconds) {
  if (!seconds) return {};
  return stoker::Clock::now() +
         std::chrono::duration_cast<stoker::Clock::duration>(std::chrono::duration<double>(*seconds));
}

void bind_pool(nb::module_& m);      // bindings_pool.cpp
void bind_segment(nb::module_& m);   // bindings_segment.cpp

}  // namespace stoker_python
