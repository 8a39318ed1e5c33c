#include "encode_kernels.hpp"
#include "stoker/simd.hpp"

#if defined(__AVX2__)
namespace stoker::encode_avx2 {
#include "encode_loops.inc.hpp"
}  // namespace stoker::encode_avx2
#endif
