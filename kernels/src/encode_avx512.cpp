#include "encode_kernels.hpp"
#include "stoker/simd.hpp"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
namespace stoker::encode_avx512 {
#include "encode_loops.inc.hpp"
}  // namespace stoker::encode_avx512
#endif
