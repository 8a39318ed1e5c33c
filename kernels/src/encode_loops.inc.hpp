// The loops of `encode_kernels.hpp`, in plain C++ that compilers turn into vectors of any width.
// Included by one file per instruction set, inside its namespace. Those are compiled without fused
// products, and sums run in eight lanes, so that all of them give the same bits.

namespace {

constexpr std::size_t kLanes = 8;

// (No vector is passed by value: how depends on the instruction set.)
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef std::int32_t Ints __attribute__((vector_size(kLanes * sizeof(std::int32_t))));
typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));

// Which of 0 to `top` the values lie in. Vectors are checked before they are sealed, but one over a
// cell's width is beyond floats where a vector all but lies on the centre. A coordinate times that
// is infinite, or, where it is zero, not a number: no integer holds either. Those are `top` and 0.
inline void to_cells(Floats& values, float top, Ints& cells) {
  values = values > 0.0f ? values : Floats{};
  values = values < top ? values : Floats{} + top;
  cells = __builtin_convertvector(values, Ints);
  values = __builtin_convertvector(cells, Floats);
}

inline void load(const float* v, Floats& out) { __builtin_memcpy(&out, v, sizeof out); }

inline void put_bytes(const Ints& cells, std::uint8_t* out) {
  typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes bytes = __builtin_convertvector(cells, Bytes);
  __builtin_memcpy(out, &bytes, sizeof bytes);
}

// A sum in lanes.
struct LaneSum {
  Lanes lanes = {};

  void add(const Floats& a, const Floats& b) {
    lanes += __builtin_convertvector(a, Lanes) * __builtin_convertvector(b, Lanes);
  }
  void add(const Floats& a, const Floats& b, const Floats& c) {
    lanes += __builtin_convertvector(a, Lanes) * __builtin_convertvector(b, Lanes) *
             __builtin_convertvector(c, Lanes);
  }
  double total() const {
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
           ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
  }
};

}  // namespace

void encode_planes(const float* v, std::size_t blocks, float inverse, std::uint8_t* high,
                   std::uint8_t* low, double* sums) {
  LaneSum with_code;
  LaneSum with_value;
  for (std::size_t b = 0; b < blocks; ++b) {
    std::uint8_t cells[kBlockDims];
    std::uint8_t parts[kBlockDims];
    for (std::size_t i = 0; i < kBlockDims; i += kLanes) {
      Floats x;
      load(v + b * kBlockDims + i, x);
      const Floats u = x * inverse;
      Floats cell = u + 8.0f;
      Ints h;
      to_cells(cell, 15.0f, h);
      // The outermost cells have no end, and sub-cells four times as wide: see refine_value().
      const Ints above = h == 15;
      const Ints below = h == 0;
      Floats part = (u + 8.0f - cell) * 16.0f;
      part = above ? (u - 7.0f) * 4.0f : part;
      part = below ? (-7.0f - u) * 4.0f : part;
      Ints l;
      to_cells(part, 15.0f, l);
      const Ints edge = 228 + 8 * l;
      Ints value = 32 * (h - 8) + 2 * l + 1;
      value = above ? edge : value;
      value = below ? -edge : value;
      with_code.add(x, cell - 7.5f);
      with_value.add(x, __builtin_convertvector(value, Floats));
      put_bytes(h, cells + i);
      put_bytes(l, parts + i);
    }
    for (std::size_t j = 0; j < kBlockBytes; ++j) {
      const std::size_t second = j + kBlockBytes;
      high[b * kBlockBytes + j] = static_cast<std::uint8_t>(cells[j] | (cells[second] << 4));
      low[b * kBlockBytes + j] = static_cast<std::uint8_t>(parts[j] | (parts[second] << 4));
    }
  }
  sums[0] = with_code.total();
  sums[1] = with_value.total();
}

double encode_cells(const float* v, const float* inverse, const float* weights, std::size_t count,
                    float zoom, int top, std::uint8_t* cells) {
  const float largest = static_cast<float>(top);
  LaneSum sum;
  const auto code = [&](const float* from, const float* scales, const float* factors,
                        std::uint8_t* out) {
    Floats x, scale, factor;
    load(from, x);
    load(scales, scale);
    load(factors, factor);
    Floats cell = x * scale * zoom + 0.5f * (largest + 1.0f);
    Ints whole;
    to_cells(cell, largest, whole);
    sum.add(x, (cell - 0.5f * largest) / zoom, factor);
    put_bytes(whole, out);
  };
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) code(v + i, inverse + i, weights + i, cells + i);
  if (i < count) {
    // Behind the end stand zeros, which add nothing.
    float rests[3][kLanes] = {};
    std::uint8_t last[kLanes];
    const float* const whole[3] = {v, inverse, weights};
    for (std::size_t part = 0; part < 3; ++part) {
      __builtin_memcpy(rests[part], whole[part] + i, (count - i) * sizeof(float));
    }
    code(rests[0], rests[1], rests[2], last);
    __builtin_memcpy(cells + i, last, count - i);
  }
  return sum.total();
}

double squared_length(const float* v, std::size_t dim) {
  LaneSum sum;
  std::size_t i = 0;
  Floats x;
  for (; i + kLanes <= dim; i += kLanes) {
    load(v + i, x);
    sum.add(x, x);
  }
  if (i < dim) {
    float rest[kLanes] = {};
    __builtin_memcpy(rest, v + i, (dim - i) * sizeof(float));
    load(rest, x);
    sum.add(x, x);
  }
  return sum.total();
}
