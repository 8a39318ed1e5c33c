#include "encode_kernels.hpp"
#include "stoker/simd.hpp"

namespace stoker::encode_portable {
#include "encode_loops.inc.hpp"
}  // namespace stoker::encode_portable
