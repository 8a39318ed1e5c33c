// The loops of `Quantizer::encode`, one set per instruction set. See `Kernels` for what they do.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stoker {

#define STOKER_ENCODE_KERNELS                                                                    \
  void encode_planes(const float* v, std::size_t blocks, float inverse, std::uint8_t* high,      \
                     std::uint8_t* low, double* sums);                                           \
  double encode_cells(const float* v, const float* inverse, const float* weights,                \
                      std::size_t count, float zoom, int top, std::uint8_t* cells);              \
  double squared_length(const float* v, std::size_t dim);

namespace encode_portable {
STOKER_ENCODE_KERNELS
}
namespace encode_avx2 {
STOKER_ENCODE_KERNELS
}
namespace encode_avx512 {
STOKER_ENCODE_KERNELS
}

#undef STOKER_ENCODE_KERNELS

}  // namespace stoker
