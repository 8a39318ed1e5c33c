// How a sealed segment's records lie in pages, and the searcher that walks them.
//
// Rows are the sealed order. Nodes of higher levels come first, so the nodes of level l are exactly
// the rows below levels[l].count, and one number addresses a node in every store.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "stoker/loss_credit.hpp"
#include "stoker/page_pool.hpp"
#include "stoker/quantizer.hpp"
#include "stoker/simd.hpp"

namespace stoker {

enum class Metric : std::uint8_t { inner_product, l2 };   // cosine is inner product of unit vectors

constexpr std::uint32_t kNoRow = 0xFFFFFFFFu;

// Division of 32-bit numbers by a constant, as one multiplication.
class Divisor {
 public:
  explicit Divisor(std::uint32_t by = 1) : by_(by), inverse_(~std::uint64_t{0} / by + 1) {}
  std::uint32_t value() const noexcept { return by_; }
  std::uint32_t quotient(std::uint32_t n) const noexcept {
    if (by_ == 1) return n;   // the inverse of 1 does not fit
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint32_t>((static_cast<Wide>(n) * inverse_) >> 64);
  }

 private:
  std::uint32_t by_;
  std::uint64_t inverse_;
};

// One level's links: records of u16 degree and `m` packed ids of `id_bits` bits, little-endian.
// A page holds per_page records and at least 8 bytes of padding behind the last.
struct LinkLevel {
  std::uint32_t count = 0;
  std::uint32_t m = 0;
  std::uint32_t id_bits = 0;
  std::uint32_t record_bytes = 0;
  Divisor per_page;
  PageNumber first_page = 0;

  PageNumber page_of(std::uint32_t row) const noexcept {
    return first_page + per_page.quotient(row);
  }
  std::size_t offset_of(std::uint32_t row) const noexcept {
    return static_cast<std::size_t>(row - per_page.quotient(row) * per_page.value()) *
           record_bytes;
  }
};

// Records that do not cross pages.
struct RecordStore {
  StoreId store = 0;
  std::uint32_t record_bytes = 0;
  Divisor per_page;

  PageNumber page_of(std::uint32_t row) const noexcept { return per_page.quotient(row); }
  std::size_t offset_of(std::uint32_t row) const noexcept {
    return static_cast<std::size_t>(row - per_page.quotient(row) * per_page.value()) *
           record_bytes;
  }
};

// Full vectors: a dense stream of records, cut into pages wherever it falls.
struct VectorStore {
  StoreId store = 0;
  std::uint32_t record_bytes = 0;
  bool half = false;   // float16 instead of float32
};

// Groups of rows that lie near each other: of each the code of its mean, and the rows that it is made
// of. A query whose walk misses a page scans the nearest groups instead, in one round of reads.
//
// Pages of group records come first, then pages of pieces. A group record is a navigation record, of
// the mean, then u32 first piece and u32 pieces; a piece is u32 first row and u32 rows.
struct RangeTable {
  static constexpr std::uint32_t kPieceBytes = 8;
  static constexpr std::uint32_t kTailBytes = 8;       // of a group record, behind the code
  static constexpr std::uint32_t kRowsMax = 1024;      // of a group

  StoreId store = 0;
  std::uint32_t groups = 0;        // 0: there is no table
  std::uint32_t record_bytes = 0;
  Divisor per_page;
  std::uint32_t pieces = 0;
  // Beyond so many groups, the nearest, pieces of less than a so manieth of their group's rows are
  // left out: to read one takes as long as to read a large one.
  std::uint32_t whole_nearest = 0xFFFFFFFFu;
  std::uint32_t small_share = 1;
};

struct SegmentLayout {
  std::uint32_t dim = 0;
  std::uint32_t count = 0;
  Metric metric = Metric::inner_product;
  std::uint32_t entry_row = 0;
  StoreId links = 0;
  std::vector<LinkLevel> levels;   // [0] is the bottom
  RecordStore codes;
  RecordStore refine;
  RecordStore coarse;              // only where walk_coarse says so
  bool walk_coarse = false;        // navigate on 2-bit codes instead of 4-bit ones
  // Navigate on the vectors themselves: those of few dimensions are no longer than a code, and tell
  // rows apart that codes do not.
  bool walk_vectors = false;
  bool unit_rows = false;          // with walk_vectors: the measure is the cosine
  VectorStore vectors;
  RangeTable ranges;
  // Standard deviation of the estimate's error over |q'||x - centre|, per plane, measured when the
  // segment was sealed. q' is what the centre leaves of the query; see PreparedQuery::shift.
  float coarse_error = 0;
  float code_error = 0;
  float refine_error = 0;
};

// A wider walk that goes on from what was found, for a query that lies farther from that than
// `below`.
struct FartherWalk {
  float below = 0;
  std::uint32_t ef = 0;
  std::uint32_t entry_ef = 1;
  std::uint32_t range_groups = 0;   // in place of SearchParams::range_groups
};
constexpr std::size_t kFartherMax = 4;

// What a query loses, as a share of the true k, by what the error model expects it to: nobody reads
// for less than is lost. Such lines are measured when a segment is sealed
// (index/loss_lines.py); the one here takes the model's word.
struct LossLine {
  float least = 0;        // where nothing is read: `least` + `share` of what is expected
  float share = 1;
  float read_least = 0;   // what reads leave, since the walk has not met it, by what was expected
  float read_share = 0;   // before them
  // Of codes that the walk compares: rows look nearer by them than they are, all of which the walk
  // ended with by about as much. That changes no order until some are known better. Where `p` of the
  // answer is, 1 + mixed * p times as much is lost as is expected.
  float mixed = 0;
};

struct SearchParams {
  std::uint32_t k = 10;
  std::uint32_t ef = 64;
  // Width of the walk on the level above the bottom, all of whose answers the bottom is entered at.
  // 1 follows it greedily, to one place, and a query whose neighbors lie elsewhere then has to find
  // a way there through the bottom, where links are short.
  std::uint32_t entry_ef = 1;
  // A narrower walk comes first, and is all there is for a query that it finds near enough to what
  // is stored: at `near_from` and above, of the nearness of index/recall_bounds.py, which takes the
  // rows' mean squared distance from their centre under l2. 0: none. Never with a filter.
  std::uint32_t near_ef = 0;
  float near_from = 0;
  float spread = 0;
  // How walks of `ef` go on where they find the query far from all that is stored, by the same
  // nearness: the last one counts that it is below. Its edges fall. Never with a filter.
  std::array<FartherWalk, kFartherMax> farther{};
  std::uint32_t farther_count = 0;
  // A walk that misses a page is left for a scan of so many groups of the layout's `ranges`, and what
  // such a scan may lose when it is settled takes the place of `mean_loss` and `rerank_target`.
  // 0: the walk reads what it misses. Not with a filter that takes out many rows.
  std::uint32_t range_groups = 0;
  // Only for who has a deadline. Of few links and codes large clusters bring all within some queries:
  // who can wait walks, and soon nobody reads.
  bool range_hurried = false;
  float range_mean_loss = 0;
  float range_rerank_target = 0;
  // Expected share of the true k among the answer, given that the walk has found them; the
  // re-rank reads pages from the device until the estimate reaches it.
  float rerank_target = 0.98f;
  // What may be lost in the mean over queries, by `line`, as a share of the true k: a query that
  // expects to lose more than `rerank_target` allows, but no more than `loss_ceiling`, is let off
  // reading while earlier ones have been that much surer. 0: every query stands alone.
  float mean_loss = 0;
  float loss_ceiling = 0;
  LossLine line;
  // The same for a query that its whole walk finds near to what is stored, as above: such walks lose
  // less. 0: the same as for any. Never with a filter.
  float near_mean_loss = 0;
  float near_rerank_target = 0;
  LossLine near_line;
  std::uint32_t rerank_reads_max = 20;
  bool read_vectors = false;        // score the answer, and what is contested, by full vectors
  bool resident_only = false;       // read nothing at all
  std::uint32_t beam = 4;           // nodes expanded ahead while reads are gathered
  Deadline deadline;                // past it, the answer is made of what is resident
  const std::uint8_t* allow = nullptr;   // packed bits over rows, little-endian; nullptr = all
  std::uint64_t allow_count = 0;
};

struct QueryStats {
  float expected_recall = 1;        // of the re-rank, by the error model
  std::uint32_t expanded = 0;       // nodes whose links were followed on level 0
  std::uint32_t evaluated = 0;      // codes compared on level 0
  std::uint32_t skipped = 0;        // links and codes, of any level, that the walk could not have
  std::uint32_t exact = 0;          // of the k answers, how many are scored by exact vectors
  std::uint32_t refined = 0;        // of the k answers, how many are scored by both planes
  std::uint32_t damaged = 0;        // records on pages that failed their checksum
  std::uint32_t hits = 0;           // records whose page was in memory when they were wanted
  std::uint32_t misses = 0;         // records whose page was not
  std::uint32_t rounds = 0;         // rounds of device reads
  std::uint64_t pages_read = 0;
  std::uint64_t bytes_read = 0;
  bool deadline_hit = false;
  std::uint32_t found = 0;          // hits
  float best = std::numeric_limits<float>::quiet_NaN();   // score of the first hit
  float query_length = 0;           // under l2 of the way from the centre
  float unrelated = 0;              // see PreparedQuery
  bool scanned = false;             // answered by a scan of the allowed rows, without a walk
  bool narrow = false;              // answered by a walk of width `near_ef`
  std::uint32_t farther = 0;        // answered by this one of the farther walks, from 1; 0: by none
  std::uint32_t range_groups = 0;   // answered by a scan of so many groups, without a walk
  std::uint32_t ranges_whole = 0;   // of them, the nearest, so many before one that was not all there
};

struct Settling;   // these three are of no use to callers
class Rerank;

class Searcher {
 public:
  struct Scratch;

  Searcher(PagePool& pool, const SegmentLayout& layout, const Quantizer& quantizer);
  ~Searcher();
  Searcher(const Searcher&) = delete;
  Searcher& operator=(const Searcher&) = delete;

  const SegmentLayout& layout() const noexcept { return layout_; }

  // `query`: dim floats, finite. Writes k rows (kNoRow where there are fewer) and scores: the
  // inner product (falling), or the squared distance (rising). Thread-safe.
  QueryStats search(const float* query, const SearchParams& params, std::uint32_t* rows,
                    float* scores);

  // Takes the answers of a batch, each once, in whatever order they are settled.
  class Answers {
   public:
    virtual ~Answers() = default;
    // Scores are where ask() was told to leave them.
    virtual void take(std::size_t number, const std::uint32_t* rows, const QueryStats& stats) = 0;
  };

  // Searches on one thread. Several at a time then meet only in the pages: what they count is added
  // up at the end of each. No longer-lived than the searcher.
  class Session {
   public:
    explicit Session(Searcher& searcher);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    // As Searcher::search(); not between ask() and finish().
    QueryStats search(const float* query, const SearchParams& params, std::uint32_t* rows,
                      float* scores);

    // One query of a batch, whose queries have the same `params`. Where its answer takes reads, it
    // is settled while later ones walk: reads of several then go to the device together, and nobody
    // waits for them. `answers` is given it during this call or a later one, at the latest in
    // finish(). `left` is how many queries of the batch are still to come. When either has thrown,
    // the session is of no more use.
    void ask(std::size_t number, const float* query, const SearchParams& params, float* scores,
             std::size_t left, Answers& answers);
    // Settles all that was asked.
    void finish(Answers& answers);

   private:
    std::unique_ptr<Settling> take_settling(const SearchParams& params);
    void go_on(std::unique_ptr<Settling> settling, Rerank& rerank, Answers& answers);
    void launch(Answers& answers);
    void land(Answers& answers);

    Searcher& searcher_;
    std::unique_ptr<Scratch> scratch_;
    bool whole_ = true;                // no call is under way, or has thrown
    std::vector<std::unique_ptr<Settling>> waiting_;   // for reads that are not issued yet
    std::vector<std::unique_ptr<Settling>> flying_;    // for those that are
    std::size_t waiting_pages_ = 0;
    std::size_t waiting_since_ = 0;    // queries asked since the first of them came
    std::size_t flight_pages_max_ = 0;   // once a query waits
    std::uint64_t hits_ = 0;
    std::uint64_t misses_ = 0;
  };

  // Records of all searches so far whose page was in memory when they were wanted, and was not.
  std::uint64_t hits() const noexcept { return hits_.load(std::memory_order_relaxed); }
  std::uint64_t misses() const noexcept { return misses_.load(std::memory_order_relaxed); }

  // Copies the exact vectors of `rows` as float32, reading pages as needed. Returns how many
  // could not be had; their output is not-a-number.
  std::size_t vectors(const std::uint32_t* rows, std::size_t count, float* out);

  // The `count` groups of the layout's `ranges` that lie nearest, in order; kNoRow where there are
  // fewer, or where their part of the table cannot be had. For calibration.
  void nearest_groups(const float* query, std::size_t count, std::uint32_t* out);

  // The errors of the estimates for given (query, row) pairs, over |q'||x - centre|: of what the
  // walk navigates on, and of both planes. For calibration.
  void estimate_errors(const float* query, const std::uint32_t* rows, std::size_t count,
                       float* walk_error, float* refine_error);

 private:
  friend class Walk;
  friend class Rerank;
  std::unique_ptr<Scratch> take_scratch();
  void give_scratch(std::unique_ptr<Scratch> scratch);

  PagePool& pool_;
  SegmentLayout layout_;
  const Quantizer& quantizer_;
  const Kernels& kernels_;
  std::atomic<std::uint64_t> hits_{0};
  std::atomic<std::uint64_t> misses_{0};
  LossCredit credit_;
  std::mutex scratch_mutex_;
  std::vector<std::unique_ptr<Scratch>> scratch_;   // bounded by the number of concurrent searches
};

}  // namespace stoker
