// Two nested codes per vector: 4 bits a dimension to navigate, 4 more to re-rank. And a coarse one
// of 2 bits, to navigate where memory is too small for 4: of every dimension alike, or, where the
// vectors vary in some directions much more than in others, 4 bits of those, 2 of the next and
// nothing of the rest.
//
// A vector is centred, rotated by a random orthonormal transform (so that every coordinate looks
// alike whatever the model that made the vectors), and cut into 16 cells per coordinate whose
// width follows the vector's own length. The second plane cuts each cell into 16 again. Each plane
// has a correction factor <x,x>/<x,code>, which makes the inner-product estimate unbiased.
//
// Source: the corrected estimator is that of RaBitQ (Gao & Long, SIGMOD 2024, arXiv:2405.12497)
// and its multi-bit extension (Gao et al., arXiv:2409.09913). Ours differs in that the planes are
// nested (a vector's first plane is readable alone), in the fixed step of 2.7 standard deviations,
// and in the four times wider outer sub-cells, which keep the tail unclipped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stoker {

// A seeded orthonormal transform of `dim` coordinates in O(dim log dim): rounds of random signs
// and a normalised Walsh-Hadamard transform over the first, then over the last 2^k coordinates.
class Rotation {
 public:
  Rotation(std::size_t dim, std::uint64_t seed);
  std::size_t dim() const noexcept { return dim_; }
  void apply(float* vector) const noexcept;   // in place

 private:
  std::size_t dim_;
  std::size_t span_;
  std::vector<float> signs_;   // kRounds * dim
};

// A coarse record: coarse_blocks * 32 code bytes, then the same two numbers as a navigation record.
// A navigation record: blocks * 32 code bytes, then f32 correction, then f32 squared length of
// the centred vector. A refinement record: blocks * 32 code bytes, then f32 correction.
struct CodeShape {
  explicit CodeShape(std::size_t dim)
      : blocks((dim + 63) / 64), code_bytes(blocks * 32),
        code_record_bytes(code_bytes + 8), refine_record_bytes(code_bytes + 4),
        coarse_blocks((dim + 127) / 128), coarse_bytes(coarse_blocks * 32),
        coarse_record_bytes(coarse_bytes + 8) {}
  std::size_t blocks;
  std::size_t code_bytes;
  std::size_t code_record_bytes;
  std::size_t refine_record_bytes;
  std::size_t coarse_blocks;
  std::size_t coarse_bytes;
  std::size_t coarse_record_bytes;
};

// The directions that coarse codes keep, the ones of most variance first. An error of a code costs
// a product what the query holds in that direction, and queries lie as vectors do: bits are worth
// most where the variance is. (Reverse water-filling; Cover & Thomas, Elements of Information
// Theory, 2nd ed., section 10.3.3, weighted by the query's own variance.)
struct CoarseBasis {
  std::size_t wide_blocks = 0;   // of kBlockDims directions with 4 bits; 0: every dimension has 2
  std::size_t directions = 0;    // kept in all; those after the wide ones have 2 bits
  float wide_step = 0;           // width of a cell over |x| / sqrt(dim), in wide blocks
  float narrow_step = 0;         // and in those of 2 bits
  std::vector<std::uint16_t> rows;   // float16, directions * dim, orthonormal

  bool used() const noexcept { return wide_blocks > 0; }
};

class Quantizer {
 public:
  // `centre` has `dim` values and is subtracted before the rotation. Throws CorruptData where the
  // basis does not fit the shape or holds what is not finite.
  Quantizer(std::size_t dim, std::uint64_t seed, const float* centre, CoarseBasis basis = {});

  std::size_t dim() const noexcept { return dim_; }
  const CodeShape& shape() const noexcept { return shape_; }
  const std::vector<float>& centre() const noexcept { return centre_; }
  const Rotation& rotation() const noexcept { return rotation_; }
  const CoarseBasis& basis() const noexcept { return basis_; }
  // Coordinates along the basis; dim floats in, basis().directions out.
  void project(const float* vector, float* out) const noexcept;

  // Encodes `count` vectors (row-major, `dim` floats each) into records of both planes, and into
  // coarse ones unless `coarse` is nullptr.
  void encode(const float* vectors, std::size_t count, std::uint8_t* codes, std::uint8_t* refines,
              std::uint8_t* coarse) const;

 private:
  std::size_t dim_;
  CodeShape shape_;
  std::vector<float> centre_;
  Rotation rotation_;
  CoarseBasis basis_;
};

// A query, prepared once: rotated, and rounded to 8 bits for the walk and 14 for the re-rank.
struct PreparedQuery {
  std::vector<float> original;       // dim
  std::vector<float> rotated;        // scratch
  std::vector<std::int8_t> q8;       // at least blocks * 64, and coarse_blocks * 128
  std::vector<std::int16_t> q16;     // blocks * 64
  float scale8 = 0;                  // rotated ~ q8 * scale8
  float scale16 = 0;
  std::int32_t sum8 = 0;             // of q8
  // For coarse codes in a basis: the coordinates, each times the width of its cells, in blocks as
  // the codes; empty where there is no basis.
  std::vector<std::int8_t> coarse8;  // wide_blocks * 64, then 128 for each other coarse block
  std::vector<std::int16_t> coarse16;   // scratch
  std::vector<float> along;             // scratch
  float coarse_scale8 = 0;
  float coarse_offset = 0;           // what a product of cells holds beyond their centred values
  float length = 0;                  // of the rotated vector
  float constant = 0;                // ip: <q, centre>; l2: |q - centre|^2
};

// `centred`: subtract the centre from the query too (l2), or not (inner product). `coarse`: for
// coarse codes too.
void prepare_query(const Quantizer& quantizer, const float* query, bool centred,
                   PreparedQuery& out, bool coarse = true);

}  // namespace stoker
