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

// The directions that coarse codes keep, the ones of most variance first. An error of a code costs
// a product what the query holds in that direction, and queries lie as vectors do: bits are worth
// most where the variance is. (Reverse water-filling; Cover & Thomas, Elements of Information
// Theory, 2nd ed., section 10.3.3, weighted by the query's own variance.)
struct CoarseBasis {
  std::size_t wide_blocks = 0;   // of kBlockDims directions with 4 bits; 0: every dimension has 2
  std::size_t directions = 0;    // kept in all; those after the wide ones have 2 bits
  // Of the wide ones, the first so many have 2 bits more, in the first places of 2 bits: cells a
  // quarter as wide.
  std::size_t fine = 0;
  // Blocks of a code whose last 8 bytes are the record's two numbers; 0: as many as a code without
  // a basis has, and the numbers follow them.
  std::size_t blocks = 0;
  std::vector<float> steps;          // width of a direction's cells over |x| / sqrt(dim)
  std::vector<std::uint16_t> rows;   // float16, directions * dim, orthonormal

  bool used() const noexcept { return wide_blocks > 0; }
};

// A coarse record: coarse_blocks * 32 code bytes, then the same two numbers as a navigation record;
// or, where a basis says so, so many blocks with the numbers in the last 8 bytes of them.
// A navigation record: blocks * 32 code bytes, then f32 correction, then f32 squared length of
// the centred vector, or what stands for it; see Quantizer::row_length2. A refinement record:
// blocks * 32 code bytes, then f32 correction.
struct CodeShape {
  static constexpr std::size_t kNumberBytes = 8;   // behind a code, or in the end of it

  explicit CodeShape(std::size_t dim, const CoarseBasis& basis = {})
      : blocks((dim + 63) / 64), code_bytes(blocks * 32),
        code_record_bytes(code_bytes + 8), refine_record_bytes(code_bytes + 4),
        coarse_blocks(basis.blocks > 0 ? basis.blocks : (dim + 127) / 128),
        coarse_bytes(coarse_blocks * 32 - (basis.blocks > 0 ? kNumberBytes : 0)),
        coarse_record_bytes(coarse_bytes + kNumberBytes) {}
  std::size_t blocks;
  std::size_t code_bytes;
  std::size_t code_record_bytes;
  std::size_t refine_record_bytes;
  std::size_t coarse_blocks;
  std::size_t coarse_bytes;          // where a coarse record has its two numbers
  std::size_t coarse_record_bytes;
};

class Quantizer {
 public:
  // `centre` has `dim` values and is subtracted before the rotation. Throws CorruptData where the
  // basis does not fit the shape or holds what is not finite, or where `row_length2` is no length.
  Quantizer(std::size_t dim, std::uint64_t seed, const float* centre, CoarseBasis basis = {},
            double row_length2 = 0);

  std::size_t dim() const noexcept { return dim_; }
  const CodeShape& shape() const noexcept { return shape_; }
  const std::vector<float>& centre() const noexcept { return centre_; }
  const Rotation& rotation() const noexcept { return rotation_; }
  // 0, or of inner products with rows of about one length: its square, R^2. Records then hold
  // |x - c|^2 + R^2 - |x|^2 in place of the squared length |x - c|^2. That is R^2 - |c|^2 - 2 <c, x - c>,
  // so it tells what every row has along the centre c, and no query needs codes for that: a query
  // along c would have all of it estimated, with an error far above what sets such rows apart.
  double row_length2() const noexcept { return row_length2_; }
  double centre_length2() const noexcept { return centre_length2_; }
  const CoarseBasis& basis() const noexcept { return basis_; }
  // Where a code in the basis has each direction's cell, and where the finer digits of the first
  // ones; in dimensions of its blocks, those of 4 bits, then those of 2.
  const std::vector<std::uint16_t>& places() const noexcept { return places_; }
  const std::vector<std::uint16_t>& fine_places() const noexcept { return fine_places_; }
  // Coordinates along the basis of a vector rounded to 14 bits, by directions rounded to 8: what that
  // errs is a tenth of what codes do. `sums`: basis().directions numbers of scratch.
  void project_rounded(const std::int16_t* vector, float scale, std::int32_t* sums,
                       float* out) const noexcept;

  // Encodes `count` vectors (row-major, `dim` floats each) into records of both planes, and into
  // coarse ones unless `coarse` is nullptr.
  void encode(const float* vectors, std::size_t count, std::uint8_t* codes, std::uint8_t* refines,
              std::uint8_t* coarse) const;

 private:
  std::vector<float> wide_rows() const;   // the basis's, in floats

  std::size_t dim_;
  std::vector<float> centre_;
  double row_length2_;
  double centre_length2_ = 0;
  Rotation rotation_;
  CoarseBasis basis_;
  CodeShape shape_;
  std::vector<std::uint16_t> places_;
  std::vector<std::uint16_t> fine_places_;
  std::vector<std::int8_t> rows8_;     // of the basis, each by its own scale
  std::vector<float> row_scales_;
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
  std::vector<std::int8_t> rounded8;    // scratch
  std::vector<std::int16_t> rounded16;  // scratch
  std::vector<std::int32_t> sums;       // scratch
  std::vector<float> along;             // scratch
  std::vector<float> placed;            // scratch
  float coarse_scale8 = 0;
  float coarse_offset = 0;           // what a product of cells holds beyond their centred values
  float length = 0;                  // of the rotated vector
  float whole_length = 0;            // ip: of the query; l2: of the way from the centre
  // Under inner products, the score of a row that has nothing to do with the query, 0 or with a
  // row_length2 the centre's where that is more; and the highest that a row can have, of length 1 or
  // of that one.
  float unrelated = 0;
  float ideal = 0;
  // What was subtracted from the query: so many times the centre. 1 under l2; 0 for inner products,
  // but with a row_length2, where it is what leaves nothing along the centre.
  double shift = 0;
  // A row's distance is `product_factor` times the product of what is left of the query with the
  // centred row, and `length_factor` times the second number of the row's record.
  float product_factor = -1;         // l2: -2
  float length_factor = 0;           // l2: 1; with a row_length2 half the shift
  // What makes a distance a score: under l2 it is added, |q - centre|^2; else the distance is taken
  // from it, <q, centre> and, with a row_length2, what `length_factor` adds to distances too much.
  float constant = 0;
};

// `l2`: of distances, not of inner products. `coarse`: for coarse codes too.
void prepare_query(const Quantizer& quantizer, const float* query, bool l2, PreparedQuery& out,
                   bool coarse = true);

}  // namespace stoker
