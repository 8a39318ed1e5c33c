// CRC-32C (Castagnoli), the checksum of every page: hardware where the processor has it, chosen
// once at run time, and a portable twin that is the reference of the tests.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stoker {

// Checksums `length` bytes. `seed` is the checksum of the bytes before them, so that
// crc32c(b, nb, crc32c(a, na)) is the checksum of a followed by b.
std::uint32_t crc32c(const void* bytes, std::size_t length, std::uint32_t seed = 0) noexcept;

// The same by tables alone (slicing by eight).
std::uint32_t crc32c_portable(const void* bytes, std::size_t length,
                              std::uint32_t seed = 0) noexcept;

// Which one crc32c() runs: "sse4.2", "armv8" or "portable".
const char* crc32c_implementation() noexcept;

}  // namespace stoker
