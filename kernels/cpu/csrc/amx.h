// Products on the matrix unit of Intel's processors (AMX, from Sapphire Rapids on), for bfloat16 and eight-bit
// integers.
//
// One instruction multiplies 16 words of up to 16 rows by the same words of 16 columns. It reads both operands in the
// layout of tile.h. With 32 rows and a tile of 32 columns, each operand that is loaded is multiplied twice, and loads
// take less time than products.
//
// A sum of bfloat16 products is made in steps of 16 words. In each step, the products of the words' first values are
// added up, those of their second values as well, and the sum of both is added to the output. Here, too, a row's result
// does not depend on other rows. It differs from that of `dot` in the last bits, so a process uses one of them for all
// rows in bfloat16. Sums of integers are equal.
//
// The operating system gives these registers only to processes that ask for them. If it refuses, `dot` is used.
#pragma once

#include <algorithm>
#include <type_traits>

#include "tile.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

constexpr int kAmxTileRows = 16;
constexpr int kMaxAmxRows = 2 * kAmxTileRows;
constexpr int kAmxWords = 16;

// A block's sums. Those of row r begin at first + r * stride, in bytes.
struct AmxSums {
  void* first;
  int64_t stride = kStepBytes;
  // Whether they are added to.
  bool has_start = false;

  char* at(int row, int half) const { return static_cast<char*>(first) + row * stride + half * kLineBytes; }
};

#if defined(HAS_AMX)
inline bool has_amx() {
  constexpr int kAskFor = 0x1023, kTileData = 18;
  static const bool is_permitted = syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
  return is_permitted;
}

template <class W>
constexpr bool kMayUseAmx = std::is_same_v<W, bf16> || std::is_same_v<W, int8>;

// Makes the compiler keep the order of memory accesses: it does not know which memory these instructions touch.
static ALWAYS_INLINE void keep_order() { asm volatile("" ::: "memory"); }

// The shape of this thread's registers, for a number of rows: 0 to 3 have sums, 4 and 5 rows, 6 and 7 columns.
class AmxShape {
 public:
  ~AmxShape() {
    if (rows_) _tile_release();
  }

  void set(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    const auto first = uint8_t(std::min(rows, kAmxTileRows)), second = uint8_t(std::max(rows - kAmxTileRows, 1));
    const uint8_t of_each[8] = {first, first, second, second, first, second, kAmxWords, kAmxWords};
    for (int i = 0; i < 8; ++i) {
      shape.bytes[i] = kLineBytes;
      shape.rows[i] = of_each[i];
    }
    keep_order();
    _tile_loadconfig(&shape);
  }

 private:
  int rows_ = 0;
};

#define AMX_MULTIPLY(SUM, ROWS, COLUMNS)         \
  if constexpr (std::is_same_v<W, int8>)         \
    _tile_dpbusd(SUM, ROWS, COLUMNS);            \
  else                                           \
    _tile_dpbf16ps(SUM, ROWS, COLUMNS)

template <class W, bool IS_HIGH>
static ALWAYS_INLINE void amx_step(const char* a, int64_t a_stride, const char* columns) {
  _tile_loadd(6, columns, kStepBytes);
  _tile_loadd(7, columns + kLineBytes, kStepBytes);
  _tile_loadd(4, a, a_stride);
  AMX_MULTIPLY(0, 4, 6);
  AMX_MULTIPLY(1, 4, 7);
  if constexpr (IS_HIGH) {
    _tile_loadd(5, a + kAmxTileRows * a_stride, a_stride);
    AMX_MULTIPLY(2, 5, 6);
    AMX_MULTIPLY(3, 5, 7);
  }
}
#undef AMX_MULTIPLY

// The words after the last whole step, padded with zeros.
template <class W, bool IS_HIGH>
__attribute__((noinline)) void amx_last_step(const char* a, int64_t a_stride, int rows, const char* tile,
                                             int64_t words) {
  alignas(64) char of_rows[kMaxAmxRows][kLineBytes] = {}, of_tile[kAmxWords][kStepBytes] = {};
  for (int r = 0; r < rows; ++r) std::memcpy(of_rows[r], a + r * a_stride, words * kWordBytes);
  std::memcpy(of_tile, tile, words * kStepBytes);
  keep_order();
  amx_step<W, IS_HIGH>(of_rows[0], kLineBytes, of_tile[0]);
}

// Computes the sums of the words of each row times a tile's 32 columns.
template <class W, bool IS_HIGH>
static ALWAYS_INLINE void amx_dot_rows(const char* a, int64_t a_stride, int rows, const char* tile, int64_t steps,
                                       const AmxSums& sums, Prefetch prefetch) {
  keep_order();
  if (sums.has_start) {
    _tile_loadd(0, sums.at(0, 0), sums.stride);
    _tile_loadd(1, sums.at(0, 1), sums.stride);
    if (IS_HIGH) _tile_loadd(2, sums.at(kAmxTileRows, 0), sums.stride);
    if (IS_HIGH) _tile_loadd(3, sums.at(kAmxTileRows, 1), sums.stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (IS_HIGH) _tile_zero(2);
    if (IS_HIGH) _tile_zero(3);
  }
  int64_t k = 0;
  for (; k + kAmxWords <= steps; k += kAmxWords, a += kLineBytes, tile += kAmxWords * kStepBytes) {
    for (int line = 0; line < prefetch.lines; ++line) __builtin_prefetch(prefetch.next + line * kLineBytes, 0, 2);
    prefetch.next += prefetch.lines * kLineBytes;
    amx_step<W, IS_HIGH>(a, a_stride, tile);
  }
  if (k < steps) amx_last_step<W, IS_HIGH>(a, a_stride, rows, tile, steps - k);
  _tile_stored(0, sums.at(0, 0), sums.stride);
  _tile_stored(1, sums.at(0, 1), sums.stride);
  if (IS_HIGH) _tile_stored(2, sums.at(kAmxTileRows, 0), sums.stride);
  if (IS_HIGH) _tile_stored(3, sums.at(kAmxTileRows, 1), sums.stride);
  keep_order();
}

// The sums of up to 32 rows and a tile, over `steps` words. `prefetch.lines` are fetched with each step of 16 words.
template <class W>
static ALWAYS_INLINE void amx_dot(AmxShape& shape, const char* a, int64_t a_stride, int rows, const char* tile,
                                  int64_t steps, const AmxSums& sums, Prefetch prefetch = {nullptr, 0}) {
  shape.set(rows);
  if (rows > kAmxTileRows)
    amx_dot_rows<W, true>(a, a_stride, rows, tile, steps, sums, prefetch);
  else
    amx_dot_rows<W, false>(a, a_stride, rows, tile, steps, sums, prefetch);
}
#else
constexpr bool has_amx() { return false; }

template <class W>
constexpr bool kMayUseAmx = false;

struct AmxShape {};

template <class W>
void amx_dot(AmxShape&, const char*, int64_t, int, const char*, int64_t, const AmxSums&, Prefetch = {nullptr, 0});
#endif
