// Sixteen lanes of four bytes: in one register with AVX-512, otherwise in several.
//
// GCC splits a vector that is wider than a register: into registers for arithmetic, but into single lanes for
// comparisons, choices and conversions, and it keeps the vector in memory in between. Here, it is therefore made of
// registers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

constexpr int kLanes = 16;
constexpr int kParts = kLanes * 4 / kRegisterBytes;

typedef float FloatPart __attribute__((vector_size(kRegisterBytes)));
typedef int32_t IntPart __attribute__((vector_size(kRegisterBytes)));
typedef uint32_t WordPart __attribute__((vector_size(kRegisterBytes)));
typedef int16_t PairPart __attribute__((vector_size(kRegisterBytes)));

typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

static ALWAYS_INLINE WordPart load_part(const char* p) {
  WordPart v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The bytes of a part of some columns, one in each lane. Compilers need many instructions to widen a short vector.
static ALWAYS_INLINE WordPart bytes_part(const char* codes, int part) {
#if defined(__AVX512F__)
  return (WordPart)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + part));
#elif defined(__AVX2__)
  return (WordPart)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + part * 8)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kRegisterBytes / sizeof(float))));
  Bytes bytes;
  std::memcpy(&bytes, codes + part * sizeof bytes, sizeof bytes);
  return __builtin_convertvector(bytes, WordPart);
#endif
}

// The same for pairs of bytes.
static ALWAYS_INLINE WordPart halves_part(const char* halves, int part) {
  typedef uint16_t Halves __attribute__((vector_size(kRegisterBytes / 2)));
  Halves of_part;
  std::memcpy(&of_part, halves + part * sizeof of_part, sizeof of_part);
  return __builtin_convertvector(of_part, WordPart);
}

#if defined(__AVX512F__)
typedef FloatPart f32x16;
typedef IntPart i32x16;
typedef WordPart u32x16;

template <class V>
static ALWAYS_INLINE V choose(i32x16 where, V yes, V no) {
  return where ? yes : no;
}

static ALWAYS_INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }
static ALWAYS_INLINE f32x16 to_float(u32x16 v) { return __builtin_convertvector(v, f32x16); }

template <class V>
static ALWAYS_INLINE V load_lanes(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
static ALWAYS_INLINE void store_lanes(void* p, const V& v) {
  std::memcpy(p, &v, sizeof v);
}

static ALWAYS_INLINE u32x16 widen(u8x16 bytes) { return (u32x16)_mm512_cvtepu8_epi32((__m128i)bytes); }
static ALWAYS_INLINE u32x16 widen(u16x16 halves) { return (u32x16)_mm512_cvtepu16_epi32((__m256i)halves); }

// The lowest bits of each lane.
static ALWAYS_INLINE u16x16 low_halves(u32x16 v) { return (u16x16)_mm512_cvtepi32_epi16((__m512i)v); }
static ALWAYS_INLINE u8x16 low_bytes(u32x16 v) { return (u8x16)_mm512_cvtepi32_epi8((__m512i)v); }
#else
template <class T>
struct Lanes {
  typedef T Part __attribute__((vector_size(kRegisterBytes)));
  Part part[kParts];

  T operator[](int lane) const { return part[lane / (kLanes / kParts)][lane % (kLanes / kParts)]; }

  // The same bits as another type.
  template <class U>
  explicit ALWAYS_INLINE operator Lanes<U>() const {
    Lanes<U> out;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) out.part[p] = (typename Lanes<U>::Part)part[p];
    return out;
  }
};

typedef Lanes<float> f32x16;
typedef Lanes<int32_t> i32x16;
typedef Lanes<uint32_t> u32x16;

// f of each part.
template <class Out, class F, class... In>
static ALWAYS_INLINE Lanes<Out> by_parts(F f, const Lanes<In>&... in) {
  Lanes<Out> out;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) out.part[p] = f(in.part[p]...);
  return out;
}

#define LANES_OPERATOR(OP, OUT)                                                                 \
  template <class T>                                                                            \
  static ALWAYS_INLINE Lanes<OUT> operator OP(const Lanes<T>& a, const Lanes<T>& b) {           \
    return by_parts<OUT>([](auto x, auto y) { return x OP y; }, a, b);                          \
  }                                                                                             \
  template <class T>                                                                            \
  static ALWAYS_INLINE Lanes<OUT> operator OP(const Lanes<T>& a, std::type_identity_t<T> b) {   \
    return by_parts<OUT>([b](auto x) { return x OP b; }, a);                                    \
  }                                                                                             \
  template <class T>                                                                            \
  static ALWAYS_INLINE Lanes<OUT> operator OP(std::type_identity_t<T> a, const Lanes<T>& b) {   \
    return by_parts<OUT>([a](auto y) { return a OP y; }, b);                                    \
  }
#define LANES_ASSIGNMENT(OP)                                          \
  LANES_OPERATOR(OP, T)                                               \
  template <class T, class U>                                         \
  static ALWAYS_INLINE Lanes<T>& operator OP##=(Lanes<T>& a, const U& b) { \
    return a = a OP b;                                                \
  }

LANES_ASSIGNMENT(+)
LANES_ASSIGNMENT(-)
LANES_ASSIGNMENT(*)
LANES_ASSIGNMENT(/)
LANES_ASSIGNMENT(&)
LANES_ASSIGNMENT(|)
LANES_ASSIGNMENT(^)
LANES_OPERATOR(<<, T)
LANES_OPERATOR(>>, T)
LANES_OPERATOR(<, int32_t)
LANES_OPERATOR(<=, int32_t)
LANES_OPERATOR(>, int32_t)
LANES_OPERATOR(>=, int32_t)
LANES_OPERATOR(==, int32_t)
LANES_OPERATOR(!=, int32_t)
#undef LANES_ASSIGNMENT
#undef LANES_OPERATOR

template <class T>
static ALWAYS_INLINE Lanes<T> operator-(const Lanes<T>& a) {
  return by_parts<T>([](auto x) { return -x; }, a);
}

template <class T>
static ALWAYS_INLINE Lanes<T> operator~(const Lanes<T>& a) {
  return by_parts<T>([](auto x) { return ~x; }, a);
}

template <class T>
static ALWAYS_INLINE Lanes<T> choose(const i32x16& where, const Lanes<T>& yes, const Lanes<T>& no) {
  return by_parts<T>([](auto w, auto y, auto n) { return w ? y : n; }, where, yes, no);
}

template <class T>
static ALWAYS_INLINE f32x16 to_float(const Lanes<T>& v) {
  return by_parts<float>([](auto x) { return __builtin_convertvector(x, FloatPart); }, v);
}

template <class V>
static ALWAYS_INLINE V load_lanes(const void* p) {
  V out;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i)
    std::memcpy(&out.part[i], static_cast<const char*>(p) + i * kRegisterBytes, kRegisterBytes);
  return out;
}

template <class V>
static ALWAYS_INLINE void store_lanes(void* p, const V& v) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) std::memcpy(static_cast<char*>(p) + i * kRegisterBytes, &v.part[i], kRegisterBytes);
}

static ALWAYS_INLINE u32x16 widen(u8x16 bytes) {
  u32x16 out;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) out.part[p] = bytes_part(reinterpret_cast<const char*>(&bytes), p);
  return out;
}

static ALWAYS_INLINE u32x16 widen(u16x16 halves) {
  u32x16 out;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) out.part[p] = halves_part(reinterpret_cast<const char*>(&halves), p);
  return out;
}

// The lowest bits of each lane.
static ALWAYS_INLINE u16x16 low_halves(const u32x16& v) {
#if defined(__AVX2__)
  const u32x16 low = v & 0xffffu;
  // the instruction packs each half of the registers separately
  const __m256i packed = _mm256_packus_epi32((__m256i)low.part[0], (__m256i)low.part[1]);
  return (u16x16)_mm256_permute4x64_epi64(packed, 0xd8);
#else
  typedef uint16_t Halves __attribute__((vector_size(kRegisterBytes / 2)));
  u16x16 out = {};
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) {
    const Halves of_part = __builtin_convertvector(v.part[p], Halves);
    std::memcpy(reinterpret_cast<char*>(&out) + p * sizeof of_part, &of_part, sizeof of_part);
  }
  return out;
#endif
}

static ALWAYS_INLINE u8x16 low_bytes(const u32x16& v) {
  const u16x16 halves = low_halves(v & 0xffu);
#if defined(__AVX2__)
  return (u8x16)_mm_packus_epi16(_mm256_castsi256_si128((__m256i)halves), _mm256_extracti128_si256((__m256i)halves, 1));
#else
  typedef uint16_t Eight __attribute__((vector_size(16)));
  typedef uint8_t EightBytes __attribute__((vector_size(8)));
  u8x16 out = {};
  for (int i = 0; i < 2; ++i) {
    Eight from;
    std::memcpy(&from, reinterpret_cast<const char*>(&halves) + i * sizeof from, sizeof from);
    const EightBytes bytes = __builtin_convertvector(from, EightBytes);
    std::memcpy(reinterpret_cast<char*>(&out) + i * sizeof bytes, &bytes, sizeof bytes);
  }
  return out;
#endif
}
#endif
