// CRC-32C. The hardware path keeps three independent chains in flight, since the instruction has a
// latency of three cycles and a throughput of one, and joins them by a table that advances a
// checksum over a fixed count of zero bytes.
// Source: Kounavis & Berry, "A systematic approach to building high performance software-based
// CRC generators" (slicing by eight). The three-chain split is the one that the instruction's
// makers recommend; ours fits its two lengths to pages of 4096 and of 512 bytes.
#include "stoker/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define STOKER_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define STOKER_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace stoker {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // reflected

using SliceTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr SliceTables make_slice_tables() {
  SliceTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? kPolynomial : 0u);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < 8; ++slice) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xFFu];
    }
  }
  return tables;
}

constexpr SliceTables kSlices = make_slice_tables();

std::uint64_t load_word(const unsigned char* from) noexcept {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

#ifdef STOKER_CRC_TARGET

// Advances a raw checksum over kLength zero bytes: four look-ups in place of kLength steps.
template <std::size_t kLength>
class ZeroRun {
 public:
  ZeroRun() noexcept {
    std::array<std::uint32_t, 32> basis{};
    for (unsigned bit = 0; bit < 32; ++bit) {
      std::uint32_t crc = 1u << bit;
      for (std::size_t i = 0; i < kLength; ++i) crc = (crc >> 8) ^ kSlices[0][crc & 0xFFu];
      basis[bit] = crc;
    }
    for (unsigned lane = 0; lane < 4; ++lane) {
      for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = 0;
        for (unsigned bit = 0; bit < 8; ++bit) {
          if ((byte >> bit & 1u) != 0) crc ^= basis[lane * 8 + bit];
        }
        tables_[lane][byte] = crc;
      }
    }
  }
  std::uint32_t operator()(std::uint32_t crc) const noexcept {
    return tables_[0][crc & 0xFFu] ^ tables_[1][crc >> 8 & 0xFFu] ^
           tables_[2][crc >> 16 & 0xFFu] ^ tables_[3][crc >> 24];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> tables_;
};

// 3 * 1360 + 16 = 4096 and 3 * 168 + 8 = 512: almost the whole of a page is interleaved.
constexpr std::size_t kLongRun = 1360;
constexpr std::size_t kShortRun = 168;

#if defined(__x86_64__)
STOKER_CRC_TARGET inline std::uint64_t step_word(std::uint64_t crc, std::uint64_t word) noexcept {
  return _mm_crc32_u64(crc, word);
}
STOKER_CRC_TARGET inline std::uint64_t step_byte(std::uint64_t crc, unsigned char byte) noexcept {
  return _mm_crc32_u8(static_cast<std::uint32_t>(crc), byte);
}
bool hardware_present() noexcept { return __builtin_cpu_supports("sse4.2") != 0; }
constexpr const char* kHardwareName = "sse4.2";
#else
STOKER_CRC_TARGET inline std::uint64_t step_word(std::uint64_t crc, std::uint64_t word) noexcept {
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
STOKER_CRC_TARGET inline std::uint64_t step_byte(std::uint64_t crc, unsigned char byte) noexcept {
  return __crc32cb(static_cast<std::uint32_t>(crc), byte);
}
bool hardware_present() noexcept {
  constexpr unsigned long kHwcapCrc32 = 1ul << 7;
  return (getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
}
constexpr const char* kHardwareName = "armv8";
#endif

template <std::size_t kLength>
STOKER_CRC_TARGET std::uint64_t interleave(std::uint64_t crc, const unsigned char*& at,
                                           std::size_t& left,
                                           const ZeroRun<kLength>& over) noexcept {
  static_assert(kLength % 8 == 0, "runs are made of words");
  while (left >= 3 * kLength) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kLength; i += 8) {
      crc = step_word(crc, load_word(at + i));
      second = step_word(second, load_word(at + kLength + i));
      third = step_word(third, load_word(at + 2 * kLength + i));
    }
    crc = over(static_cast<std::uint32_t>(crc)) ^ second;
    crc = over(static_cast<std::uint32_t>(crc)) ^ third;
    at += 3 * kLength;
    left -= 3 * kLength;
  }
  return crc;
}

STOKER_CRC_TARGET std::uint32_t crc32c_hardware(const void* bytes, std::size_t length,
                                                std::uint32_t seed) noexcept {
  static const ZeroRun<kLongRun> over_long;
  static const ZeroRun<kShortRun> over_short;
  const auto* at = static_cast<const unsigned char*>(bytes);
  std::uint64_t crc = ~seed;
  crc = interleave(crc, at, length, over_long);
  crc = interleave(crc, at, length, over_short);
  for (; length >= 8; at += 8, length -= 8) crc = step_word(crc, load_word(at));
  for (; length > 0; ++at, --length) crc = step_byte(crc, *at);
  return ~static_cast<std::uint32_t>(crc);
}

#endif  // STOKER_CRC_TARGET

using Function = std::uint32_t (*)(const void*, std::size_t, std::uint32_t) noexcept;

Function choose() noexcept {
#ifdef STOKER_CRC_TARGET
  if (hardware_present()) return crc32c_hardware;
#endif
  return crc32c_portable;
}

Function chosen() noexcept {
  static const Function function = choose();
  return function;
}

}  // namespace

std::uint32_t crc32c_portable(const void* bytes, std::size_t length,
                              std::uint32_t seed) noexcept {
  const auto* at = static_cast<const unsigned char*>(bytes);
  std::uint32_t crc = ~seed;
  // The word is put together from bytes, so that the twin does not depend on byte order.
  for (; length >= 8; at += 8, length -= 8) {
    crc ^= static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8 |
           static_cast<std::uint32_t>(at[2]) << 16 | static_cast<std::uint32_t>(at[3]) << 24;
    crc = kSlices[7][crc & 0xFFu] ^ kSlices[6][crc >> 8 & 0xFFu] ^
          kSlices[5][crc >> 16 & 0xFFu] ^ kSlices[4][crc >> 24] ^ kSlices[3][at[4]] ^
          kSlices[2][at[5]] ^ kSlices[1][at[6]] ^ kSlices[0][at[7]];
  }
  for (; length > 0; ++at, --length) crc = (crc >> 8) ^ kSlices[0][(crc ^ *at) & 0xFFu];
  return ~crc;
}

std::uint32_t crc32c(const void* bytes, std::size_t length, std::uint32_t seed) noexcept {
  return chosen()(bytes, length, seed);
}

const char* crc32c_implementation() noexcept {
#ifdef STOKER_CRC_TARGET
  if (chosen() == crc32c_hardware) return kHardwareName;
#endif
  return "portable";
}

}  // namespace stoker
