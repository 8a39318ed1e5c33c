#include "stoker/simd.hpp"

#include <cstdlib>
#include <cstring>
#include <string>

namespace stoker {

float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  std::uint32_t exponent = (half >> 10) & 0x1Fu;
  std::uint32_t mantissa = half & 0x3FFu;
  std::uint32_t bits;
  if (exponent == 0) {
    if (mantissa == 0) {
      bits = sign;
    } else {
      exponent = 127 - 15 + 1;
      while ((mantissa & 0x400u) == 0) {
        mantissa <<= 1;
        --exponent;
      }
      bits = sign | (exponent << 23) | ((mantissa & 0x3FFu) << 13);
    }
  } else if (exponent == 31) {
    bits = sign | 0x7F800000u | (mantissa << 13);
  } else {
    bits = sign | ((exponent + 127 - 15) << 23) | (mantissa << 13);
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::uint16_t float_to_half(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x7F800000u) {
    return static_cast<std::uint16_t>(sign | 0x7C00u | (magnitude > 0x7F800000u ? 0x200u : 0u));
  }
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x33000001u) return sign;
  const std::uint32_t exponent = magnitude >> 23;
  std::uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
  std::uint32_t shift = 13;
  std::uint32_t base = 0;
  if (exponent < 113) {
    shift += 113 - exponent;
  } else {
    base = (exponent - 113) << 10;
  }
  const std::uint32_t half = 1u << (shift - 1);
  const std::uint32_t odd = (mantissa >> shift) & 1u;
  mantissa = (mantissa + half - 1 + odd) >> shift;
  return static_cast<std::uint16_t>(sign | (base + mantissa));
}

namespace {

const Kernels& choose() {
  const Kernels* best = avx512_kernels();
  if (best == nullptr) best = avx2_kernels();
  if (best == nullptr) best = neon_kernels();
  if (best == nullptr) best = &portable_kernels();
  if (const char* wanted = std::getenv("STOKER_SIMD")) {
    const Kernels* const tables[] = {&portable_kernels(), avx2_kernels(), avx512_kernels(),
                                     neon_kernels()};
    for (const Kernels* table : tables) {
      if (table != nullptr && std::strcmp(table->name, wanted) == 0) return *table;
    }
  }
  return *best;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace stoker
