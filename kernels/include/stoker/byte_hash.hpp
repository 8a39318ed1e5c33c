// A hash of bytes for tables in memory, seeded per process, so that nobody outside can aim keys at
// one slot. Never stored.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace stoker {

std::uint64_t process_hash_seed();

inline std::uint64_t fold_product(std::uint64_t a, std::uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

inline std::uint64_t hash_bytes(std::string_view bytes, std::uint64_t seed) {
  constexpr std::uint64_t kFirst = 0x9E3779B97F4A7C15u;
  constexpr std::uint64_t kSecond = 0xD6E8FEB86659FD93u;
  std::uint64_t hash = seed ^ fold_product(bytes.size() ^ kFirst, kSecond);
  const char* at = bytes.data();
  std::size_t left = bytes.size();
  while (left >= 8) {
    std::uint64_t word;
    std::memcpy(&word, at, 8);
    hash = fold_product(hash ^ word, kFirst) ^ kSecond;
    at += 8;
    left -= 8;
  }
  if (left > 0) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, left);
    hash = fold_product(hash ^ word, kSecond);
  }
  return fold_product(hash ^ seed, kFirst);
}

}  // namespace stoker
