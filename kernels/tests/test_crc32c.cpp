// CRC-32C: published vectors, and the chosen implementation against a bit-by-bit model.
#include "stoker/crc32c.hpp"

#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"

namespace {

std::uint32_t bit_by_bit(const unsigned char* bytes, std::size_t length, std::uint32_t seed) {
  std::uint32_t crc = ~seed;
  for (std::size_t i = 0; i < length; ++i) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

// RFC 3720, appendix B.4.
void test_published_vectors() {
  std::vector<unsigned char> bytes(32, 0);
  CHECK_EQ(stoker::crc32c(bytes.data(), 32), 0x8A9136AAu);
  CHECK_EQ(stoker::crc32c_portable(bytes.data(), 32), 0x8A9136AAu);
  std::fill(bytes.begin(), bytes.end(), static_cast<unsigned char>(0xFF));
  CHECK_EQ(stoker::crc32c(bytes.data(), 32), 0x62A8AB43u);
  for (unsigned i = 0; i < 32; ++i) bytes[i] = static_cast<unsigned char>(i);
  CHECK_EQ(stoker::crc32c(bytes.data(), 32), 0x46DD794Eu);
  CHECK_EQ(stoker::crc32c("123456789", 9), 0xE3069283u);
  CHECK_EQ(stoker::crc32c(nullptr, 0), 0u);
}

void test_every_length_agrees() {
  std::mt19937_64 random(20250917);
  std::vector<unsigned char> bytes(3 * 4096 + 64);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  for (std::size_t length = 0; length <= 600; ++length) {
    const std::size_t shift = random() % 16;  // every alignment
    const auto seed = static_cast<std::uint32_t>(random());
    const std::uint32_t expected = bit_by_bit(bytes.data() + shift, length, seed);
    CHECK_EQ(stoker::crc32c(bytes.data() + shift, length, seed), expected);
    CHECK_EQ(stoker::crc32c_portable(bytes.data() + shift, length, seed), expected);
  }
  for (int round = 0; round < 200; ++round) {
    const std::size_t length = 3900 + random() % 8300;
    const std::size_t shift = random() % 16;
    const std::uint32_t expected = bit_by_bit(bytes.data() + shift, length, 0);
    CHECK_EQ(stoker::crc32c(bytes.data() + shift, length), expected);
    CHECK_EQ(stoker::crc32c_portable(bytes.data() + shift, length), expected);
    const std::size_t cut = random() % length;
    CHECK_EQ(stoker::crc32c(bytes.data() + shift + cut, length - cut,
                            stoker::crc32c(bytes.data() + shift, cut)),
             expected);
  }
}

void test_single_flips_are_seen() {
  std::vector<unsigned char> page(4096, 0x5A);
  const std::uint32_t whole = stoker::crc32c(page.data(), page.size());
  for (std::size_t bit = 0; bit < page.size() * 8; bit += 37) {
    page[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
    CHECK(stoker::crc32c(page.data(), page.size()) != whole);
    page[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
  }
}

}  // namespace

int main() {
  std::printf("crc32c runs on %s\n", stoker::crc32c_implementation());
  RUN(test_published_vectors);
  RUN(test_every_length_agrees);
  RUN(test_single_flips_are_seen);
  return 0;
}
